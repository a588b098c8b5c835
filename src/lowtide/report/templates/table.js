// The table of decisions: the rows are there without this; it sorts, searches and counts them.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("decisions-table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row, index) => ({
    row, index, text: row.textContent.toLowerCase(),
    keys: [...row.cells].map((cell) => (cell.dataset.value === undefined ? cell.textContent.toLowerCase() : Number(cell.dataset.value))),
    action: row.dataset.action,
  }));
  const headings = [...table.tHead.rows[0].cells];
  const search = document.getElementById("search"), action = document.getElementById("action");
  const count = document.getElementById("decisions-count"), order = document.getElementById("order");

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0;
    for (const each of rows) {
      const keep = (!action.value || each.action === action.value) && words.every((word) => each.text.includes(word));
      each.row.hidden = !keep;
      visible += keep;
    }
    count.textContent = `${visible} of ${rows.length} activations`;
  };
  const unsort = () => {
    rows.sort((a, b) => a.index - b.index);
    body.append(...rows.map((each) => each.row));
    headings.forEach((heading) => heading.setAttribute("aria-sort", "none"));
  };
  const sort = (column, direction) => {
    const sign = direction === "ascending" ? 1 : -1;
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    rows.sort((a, b) => sign * compare(a.keys[column], b.keys[column]) || a.index - b.index);
    body.append(...rows.map((each) => each.row));
    headings.forEach((heading, i) => heading.setAttribute("aria-sort", i === column ? direction : "none"));
    order.value = `${column} ${direction}`;
  };
  headings.forEach((heading, column) => {
    heading.firstElementChild.addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      const first = heading.classList.contains("num") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      sort(column, now === first ? second : first);
    });
    for (const direction of ["ascending", "descending"]) {
      const words = heading.textContent + (direction === "ascending" ? ", rising" : ", falling");
      order.append(new Option(words, `${column} ${direction}`));
    }
  });
  order.addEventListener("change", () => {
    const [column, direction] = order.value.split(" ");
    if (direction) sort(Number(column), direction);
    else unsort();
  });
  search.addEventListener("input", filter);
  action.addEventListener("change", filter);
  filter();
});
