// The graph around an activation, without and with the plan: shown for the row of the table that is chosen.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const panel = document.getElementById("around");
  const page = JSON.parse(document.getElementById("report-data").textContent);
  if (!panel || !page.around) return;
  const { names } = page.timeline, flat = Decode.integers(page.around);
  // For every decision: maker, then made from, read in forward, read in backward, rematerialized, rematerialized from.
  const all = [];
  for (let at = 0; at < flat.length;) {
    const maker = flat[at++], lists = [];
    for (let i = 0; i < 5; i++) {
      const size = flat[at++];
      lists.push(flat.slice(at, at + size));
      at += size;
    }
    all.push({ maker, from: lists[0], forward: lists[1], backward: lists[2], again: lists[3], againFrom: lists[4] });
  }
  const MOST = 5, WIDE = 134, HIGH = 22, ROW = 28, COLUMN = 160;
  const svg = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const box = (name, column, row, colour, extra = {}) => {
    const group = svg("g", {}), x = column * COLUMN, y = 20 + row * ROW;
    group.append(svg("title", {}, name));
    group.append(svg("rect", { x, y, width: WIDE, height: HIGH, rx: 4, fill: colour, stroke: "var(--line)", ...extra }));
    const short = name.length > 18 ? name.slice(0, 17) + "…" : name;
    group.append(svg("text", { x: x + 6, y: y + 15, "font-size": 12, fill: extra.text || "var(--ink)" }, short));
    return { group, left: [x, y + HIGH / 2], right: [x + WIDE, y + HIGH / 2] };
  };
  const some = (ranks) => {
    const found = ranks.slice(0, MOST).map((rank) => names[rank]);
    return ranks.length > MOST ? [...found, `and ${ranks.length - MOST} more`] : found;
  };
  const picture = (title, columns, links) => {
    const rows = Math.max(...columns.map((column) => column.length), 1);
    const drawn = svg("svg", { viewBox: `0 0 ${2 * COLUMN + WIDE + 2} ${24 + rows * ROW}`, width: "100%", style: `max-width:${2 * COLUMN + WIDE + 60}px`, role: "img", "aria-label": title });
    drawn.append(svg("text", { x: 0, y: 12, "font-size": 13, "font-weight": 600, fill: "var(--ink)" }, title));
    const boxes = columns.map((column, c) => column.map((one, r) => one && box(one.name, c, r, one.colour || "var(--soft)", one.extra)));
    for (const [c, r, c2, r2] of links) {
      const [x1, y1] = boxes[c][r].right, [x2, y2] = boxes[c2][r2].left;
      drawn.append(svg("path", { d: `M${x1},${y1} C${x1 + 18},${y1} ${x2 - 18},${y2} ${x2},${y2}`, fill: "none", stroke: "var(--muted)" }));
    }
    for (const one of boxes.flat()) if (one) drawn.append(one.group);
    return drawn;
  };
  const plain = (list) => list.map((name) => ({ name }));
  const orange = { colour: "#f0a63c", extra: { text: "#10161c" } };
  const each = (list, make) => list.map((_, i) => make(i));
  const show = (row) => {
    const one = all[Number(row.dataset.around)], action = row.dataset.action;
    if (!one) return;
    const from = plain(some(one.from)), forward = plain(some(one.forward)), backward = plain(some(one.backward));
    const name = row.cells[0].textContent;
    const before = picture("Baseline", [from, [{ name, ...orange }], [...forward, ...backward]],
      [...each(from, (i) => [0, i, 1, 0]), ...each([...forward, ...backward], (i) => [1, 0, 2, i])]);
    let after;
    if (action === "RETAINED") {
      after = picture("With the plan: kept as it is", [from, [{ name, ...orange }], [...forward, ...backward]],
        [...each(from, (i) => [0, i, 1, 0]), ...each([...forward, ...backward], (i) => [1, 0, 2, i])]);
    } else {
      const away = action === "OFFLOAD", colour = away ? "#7db8e8" : "#f2919f";
      const again = some(one.again).map((made) => ({ name: made, colour, extra: { text: "#10161c" } }));
      const sources = plain(some(one.againFrom));
      const gap = Math.max(from.length, forward.length, 1) + 1, pad = (list) => [...Array(Math.max(0, gap - list.length)).fill(null)];
      const dashed = { name, colour: "none", extra: { "stroke-dasharray": "4 3" } };
      after = picture(away ? "With the plan: offloaded to the store" : "With the plan: freed and recomputed",
        [[...from, ...pad(from), ...sources], [dashed, ...pad([1]), ...again], [...forward, ...pad(forward), ...backward]],
        [...each(from, (i) => [0, i, 1, 0]), ...each(forward, (i) => [1, 0, 2, i]),
          ...each(sources, (i) => [0, gap + i, 1, gap]), ...each(backward, (i) => [1, gap + again.length - 1, 2, gap + i])]);
    }
    panel.querySelector("h3").textContent = `Around ${name}`;
    panel.querySelector(".columns").replaceChildren(...[before, after].map((made) => {
      const cell = document.createElement("div");
      cell.append(made);
      return cell;
    }));
    panel.hidden = false;
    for (const other of document.querySelectorAll("tr.chosen")) other.classList.remove("chosen");
    row.classList.add("chosen");
  };
  const table = document.getElementById("decisions-table");
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr");
    if (row) show(row);
  });
  table.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("tbody tr")) show(event.target);
  });
  show(table.tBodies[0].rows[0]);
});
