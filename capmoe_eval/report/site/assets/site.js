// Sorts tables and filters rows. Without it every page shows all that it has, in the written order.
"use strict";

const collator = new Intl.Collator("en", { numeric: true });

function cellKey(row, column) {
  const cell = row.cells[column];
  if (cell === undefined) return null;
  if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
  const text = cell.textContent.trim();
  return text === "" || text === "—" ? null : text;
}

// Absent values stay last in either direction; equal ones keep the written order.
function compare(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null);
  if (typeof one === "number" && typeof other === "number") return sign * (one - other);
  return sign * collator.compare(String(one), String(other));
}

function sort(table, column, direction) {
  const bodies = [...table.tBodies];
  if (direction === "none") {
    for (const { row, body } of table.written) body.append(row);
  } else {
    const sign = direction === "ascending" ? 1 : -1;
    const rows = table.written.map(({ row }) => ({ row, key: cellKey(row, column) }));
    rows.sort((one, other) => compare(one.key, other.key, sign));
    bodies[0].append(...rows.map(({ row }) => row));
  }
  const headings = table.tHead.rows[0].cells;
  for (const [index, heading] of [...headings].entries()) {
    heading.setAttribute("aria-sort", index === column ? direction : "none");
  }
}

const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

function makeSortable(table) {
  table.written = [...table.tBodies].flatMap((body) => [...body.rows].map((row) => ({ row, body })));
  for (const [column, heading] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      sort(table, column, NEXT[heading.getAttribute("aria-sort")]);
    });
  }
}

function isShown(row, form) {
  const keep = form.elements.baselines;
  for (const select of form.querySelectorAll("select")) {
    const own = row.dataset[select.name];
    if (select.value === "" || own === undefined || own === select.value) continue;
    const spared = keep && keep.checked && row.dataset.method === "baseline";
    if (!(spared && (select.name === "method" || select.name === "gamma"))) return false;
  }
  return true;
}

function applyFilters(form) {
  const names = [...form.querySelectorAll("select")].map((select) => `tr[data-${select.name}]`);
  const rows = [...document.querySelectorAll(names.join(","))];
  let shown = 0;
  for (const row of rows) {
    row.hidden = !isShown(row, form);
    shown += !row.hidden;
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const all = [...table.tBodies].flatMap((body) => [...body.rows]);
    const empty = all.length > 0 && all.every((row) => row.hidden);
    const section = table.closest("section.result");
    if (section) section.classList.toggle("empty", empty);
  }
  form.querySelector(".shown").textContent =
    shown === rows.length ? `All ${rows.length} rows` : `${shown} of ${rows.length} rows`;
}

function startFilters(form) {
  form.hidden = false;
  form.addEventListener("change", () => applyFilters(form));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.querySelector("button").addEventListener("click", (event) => {
    event.preventDefault();
    form.reset();
    applyFilters(form);
  });
  // Going back, a browser may fill in what was chosen before.
  window.addEventListener("pageshow", () => applyFilters(form));
  applyFilters(form);
}

for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
for (const form of document.querySelectorAll("form.filters")) startFilters(form);

// What is folded is on paper, too.
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const details of folded) details.open = true;
});
window.addEventListener("afterprint", () => {
  for (const details of folded) details.open = false;
});
