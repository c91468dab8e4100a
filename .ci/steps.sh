# What .ci/run and .ci/nightly share: a fresh clone, its environments, steps whose times are reported. Both source it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
origin=$PWD

# The real evaluation sets, where they lie beside the checkout.
if [ -z "${CAPMOE_DATA_ROOT:-}" ] && [ -d ../shared/data/hub ]; then
  CAPMOE_DATA_ROOT=$(cd ../shared/data/hub && pwd)
  export CAPMOE_DATA_ROOT
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/capmoe-ci
work=$(mktemp -d)
trap finish EXIT
mkdir -p "$cache"
git clone --quiet . "$work/checkout"
cd "$work/checkout"

# step NAME COMMAND...: runs a command and notes its time.
step() {
  local name=$1 TIMEFORMAT="%R %U %S $1"
  shift
  echo "== $name"
  { time "$@" 2>&3; } 3>&2 2>> "$work/times"
}

# beside FUNCTION...: runs lists of steps at the same time, and prints what each said.
beside() {
  local list pids=() failed=0
  for list; do
    ( "$list" ) > "$work/$list.log" 2>&1 &
    pids+=($!)
  done
  for list; do
    wait "${pids[0]}" || failed=1
    pids=("${pids[@]:1}")
    cat "$work/$list.log"
  done
  return "$failed"
}

# Prints the minutes of every step, also after a failure. Those of `beside` overlap.
finish() {
  local status=$?
  printf '\n%8s %12s  %s\n' minutes 'of CPU' step
  awk '{ wall = $1; cpu = $2 + $3; $1 = $2 = $3 = ""; printf "%8.1f %12.1f %s\n", wall / 60, cpu / 60, $0 }' "$work/times" || :
  awk -v s="$SECONDS" 'BEGIN { printf "%8.1f %12s  all\n", s / 60, "" }'
  rm -rf "$work"
  exit "$status"
}

# Nothing that users run, and no test, changes a file of the repository.
unchanged() {
  [ -z "$(git status --porcelain)" ] || { echo "files of the repository were changed:"; git status --porcelain; exit 1; }
}

# packages COMMAND NAME...: Debian's packages, unless the command is there. Without them tests are skipped, and say so.
packages() {
  if ! command -v "$1" > /dev/null && [ "$(id -u)" = 0 ]; then
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${@:2}"; } > /dev/null \
      || echo "$1 could not be installed"
  fi
}

# environment DIRECTORY: makes an environment with the packages of its lock, as `make DIRECTORY/.locked` does. They are kept
# as an archive, named after the lock, the recipe and the Python, with its hash; a run unpacks it and never writes to it.
environment() {
  local venv=$1 kept
  kept=$venv-$({ cat lock/*.txt; make --dry-run "$venv/.locked"; python3 -VV; } | sha256sum | cut -c 1-16)
  if (cd "$cache" && sha256sum --status --check "$kept.sha256") 2> /dev/null; then
    tar -xf "$cache/$kept.tar"
    grep -rlIZ "$(cat "$venv/.path")" "$venv/bin" "$venv/pyvenv.cfg" \
      | xargs -0 sed -i "s|$(cat "$venv/.path")|$PWD/$venv|g"
    touch "$venv/.locked"
  else
    make "$venv/.locked"
    echo "$PWD/$venv" > "$venv/.path"
    find "$cache" -name "$venv-*" -mtime +7 -delete
    tar -cf "$cache/$kept.tar" "$venv"
    (cd "$cache" && sha256sum "$kept.tar" > "$kept.sha256")
  fi
}

# The wheel and what it needs: an environment of its own, which takes the other packages from .venv, but for those beside
# the suite.
wheel() {
  local suite=$work/packages
  mkdir "$suite"
  ln -s "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/* "$suite"
  rm "$suite"/capmoe_methods-* "$suite"/capmoe_bench-* "$suite"/capmoe_report-* "$suite"/capmoe_serve-* "$suite"/capmoe_zoo-* "$suite"/capmoe_benchmarks-*
  .venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work/dist" .
  .venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work/records" packages/capmoe-records
  python3 -m venv "$work/other"
  "$work/other/bin/pip" install --quiet --disable-pip-version-check --no-deps "$work"/dist/*.whl
  mkdir "$work/elsewhere"
  cd "$work/elsewhere"
  PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval run --help model | grep -q tiny_olmoe
  PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval gamma=1.0 method=score tasks=obqa limit=2
  "$work/other/bin/pip" install --quiet --disable-pip-version-check --no-deps "$work"/records/*.whl
  PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval table table2 --out "$work/rendered" > /dev/null
  (cd "$work/checkout" && .venv/bin/capmoe-eval table table2 --out "$work/expected" > /dev/null)
  diff "$work/expected/zoo/table2.tex" "$work/rendered/zoo/table2.tex"
  ! PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval method=oea k0=1 2> "$work/refused"
  grep -q '^error: method=oea: capmoe-methods is not installed; in a checkout, pip install ./packages/capmoe-methods' "$work/refused"
  ! PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval claims 2> "$work/refused"
  grep -q '^error: claims: capmoe-report is not installed; in a checkout, pip install ./packages/capmoe-report' "$work/refused"
  ! PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval train olmoe 2> "$work/refused"
  grep -q '^error: train: capmoe-zoo is not installed; in a checkout, pip install ./packages/capmoe-zoo' "$work/refused"
  ! PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval bench ep 2> "$work/refused"
  grep -q '^error: bench: capmoe-bench is not installed; in a checkout, pip install ./packages/capmoe-bench' "$work/refused"
  ! PYTHONPATH=$suite "$work/other/bin/python" -m capmoe_eval advise example 2> "$work/refused"
  grep -q '^error: advise: capmoe-serve is not installed; in a checkout, pip install ./packages/capmoe-serve' "$work/refused"
  [ "$(ls -A)" = results ] || { echo "something was left beside results/: $(ls -A)"; exit 1; }
  cd "$work/checkout"
}

# What the tests of a part depend on; `PART_tested` has a line for each content under which they passed.
declare -A inputs=(
  [server]="packages/capmoe-serve capmoe_eval/wrapper capmoe_eval/routing .ci/vllm lock"
  [serve]="packages/capmoe-serve packages/capmoe-methods packages/capmoe-bench packages/capmoe-report capmoe_eval conf tests results/zoo lock"
  [methods]="packages/capmoe-methods packages/capmoe-bench capmoe_eval conf tests results lock"
  [report]="packages/capmoe-report packages/capmoe-bench capmoe_eval conf tests results docs/zoo lock"
  [bench]="packages/capmoe-bench capmoe_eval conf tests results lock"
  [benchmarks]="benchmarks packages/capmoe-bench capmoe_eval conf tests results/bench lock"
  [zoo]="packages/capmoe-zoo capmoe_eval conf tests lock"
)
content() { git ls-tree HEAD -- ${inputs[$1]} | sha256sum | cut -c 1-16; }

# part NAME: runs the tests of a part of the repository.
part() {
  [ "$1" != server ] || environment .venv-server
  make "test-$1"
  content "$1" >> "$cache/$1_tested"
}

# changed NAME: runs them unless they passed with this content before.
changed() {
  if grep -qxs "$(content "$1")" ".ci/$1_tested" "$cache/$1_tested"; then
    echo "== make test-$1: passed with this content before"
  else
    step "make test-$1" part "$1"
  fi
}
