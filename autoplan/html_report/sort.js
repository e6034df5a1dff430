"use strict";
// Tables that sort: the names of their columns become buttons. Without a script they stay plain tables.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const names = Array.from(table.tHead.rows[0].cells);
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  // Numbers before texts, whichever way numbers are sorted: "does not fit" is never the fastest.
  const compare = (a, b, sign) =>
    typeof a !== typeof b ? (typeof a === "number" ? -1 : 1)
      : sign * (typeof a === "number" ? a - b : a.localeCompare(b));
  names.forEach((name, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...name.childNodes);
    name.append(button);
    button.addEventListener("click", () => {
      const sign = name.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      names.forEach((other) => other.removeAttribute("aria-sort"));
      name.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = Array.from(body.rows);
      rows.sort((a, b) => compare(value(a, column), value(b, column), sign));
      body.append(...rows);
    });
  });
}
