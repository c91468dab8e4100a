// Sorts tables by their headings and filters the records. Without it every page shows all it has.
"use strict";

const collator = new Intl.Collator("en", { numeric: true });
const textOf = (row, column) => row.cells[column]?.textContent.trim() ?? "";

// The number that a text begins with: not one of a date or a name.
function numberOf(text) {
  const match = /^([−+-]?[\d.,]+|\+∞)(?=$|[\s%▲▼§†(])/.exec(text);
  return match ? Number(match[1].replace("−", "-").replace("∞", "Infinity").replaceAll(",", "")) : NaN;
}

// Absent values stay last in either direction; equal ones keep their order.
function compare(one, other, sign) {
  const absent = (text) => text === "" || text === "—" || text === "–";
  if (absent(one) || absent(other)) return absent(one) - absent(other);
  const [a, b] = [numberOf(one), numberOf(other)];
  if (Number.isNaN(a) || Number.isNaN(b)) return sign * collator.compare(one, other);
  return a === b ? 0 : sign * (a < b ? -1 : 1);
}

const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

for (const table of document.querySelectorAll("table.sortable, table.capmoe")) {
  const headings = [...table.tHead.rows[0].cells];
  const written = [...table.tBodies].map((body) => [body, [...body.rows]]);
  const sort = (column) => {
    const direction = NEXT[headings[column].getAttribute("aria-sort") ?? "none"];
    for (const heading of headings) heading.setAttribute("aria-sort", "none");
    headings[column].setAttribute("aria-sort", direction);
    for (const [body, rows] of written) body.append(...rows);
    if (direction === "none") return;
    const sign = direction === "ascending" ? 1 : -1;
    const keyed = written.flatMap(([, rows]) => rows).map((row) => [textOf(row, column), row]);
    keyed.sort(([one], [other]) => compare(one, other, sign));
    table.tBodies[0].append(...keyed.map(([, row]) => row));
  };
  headings.forEach((heading, column) => {
    heading.tabIndex = 0;
    heading.addEventListener("click", () => sort(column));
    heading.addEventListener("keydown", (event) => event.key === "Enter" && sort(column));
  });
}

// A choice for each of the first columns; the address has those of a link: #model=m&method=score.
function startFilters(form, table) {
  const rows = [...table.tBodies[0].rows];
  const status = document.createElement("output");
  const columns = new Map();
  for (const column of [0, 1, 2, 3]) {
    const name = textOf(table.tHead.rows[0], column);
    const label = document.createElement("label");
    const select = document.createElement("select");
    const values = [...new Set(rows.map((row) => textOf(row, column)))];
    select.append(new Option("all", ""), ...values.sort(collator.compare).map((v) => new Option(v)));
    label.append(`${name} `, select);
    form.append(label);
    columns.set(select, [name, column]);
  }
  const apply = () => {
    const chosen = [...columns].filter(([select]) => select.value !== "");
    const fits = (row) => chosen.every(([select, [, column]]) => textOf(row, column) === select.value);
    for (const row of rows) row.hidden = !fits(row);
    status.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  const read = () => {
    const words = new URLSearchParams(location.hash.slice(1));
    for (const [select, [name]] of columns) select.value = words.get(name) ?? "";
    apply();
  };
  form.append(status);
  form.addEventListener("change", apply);
  addEventListener("hashchange", read);
  form.hidden = false;
  read();
}

const form = document.querySelector("form.filters");
if (form) startFilters(form, document.getElementById("records"));
const folded = document.getElementById(location.hash.slice(1));
if (folded?.tagName === "DETAILS") folded.open = true;
