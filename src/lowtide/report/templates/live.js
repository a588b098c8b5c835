// What is live at one time point of the step: by module, as a flame graph that zooms and can be searched.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const page = JSON.parse(document.getElementById("report-data").textContent);
  const flame = document.getElementById("flame");
  if (!flame || !page.timeline) return;
  const data = page.timeline, stored = data.storages, names = data.names;
  const [ops, modules, sources] = [data.ops, data.modules, data.sources].map(Decode.strings);
  const regions = Decode.integers(data.regions).map((region) => data.region_names[region]);
  const labels = page.kinds.map((kind) => kind.label);
  const storageName = Decode.integers(stored.name).map((n) => (n < 0 ? stored.names[-1 - n] : names[n]));
  const storageKind = Decode.integers(stored.kind), statics = Decode.integers(stored.static);
  const lines = Decode.strings(stored.lines), stackOf = Decode.integers(stored.stack);
  const stacks = [];
  Decode.integers(stored.depths).reduce((at, depth) => (stacks.push(lines.slice(at, at + depth)), at + depth), 0);
  const load = (packed) => packed && {
    order: Decode.integers(packed.order), again: Decode.strings(packed.methods), label: packed.label,
    ...Object.fromEntries(Object.entries(packed.blocks).map(([key, text]) => [key, Decode.integers(text)])),
  };
  const runs = { before: load(data.before), after: load(data.after) };
  for (const run of Object.values(runs)) if (run) run.isPinned = new Set(run.pinned);
  // Frames stand in the order in which modules first run, so that they keep their places as time goes on.
  const firstRun = new Map();
  modules.forEach((module, rank) => {
    for (let path = module; path && !firstRun.has(path); path = path.slice(0, Math.max(0, path.lastIndexOf(".")))) firstRun.set(path, rank);
  });

  const PARAMETER = labels.indexOf("parameters"), BUFFER = labels.indexOf("buffers"), OTHER = labels.length - 1;
  const liveAt = (run, at) => {
    const rows = [], last = run.order.length - 1;
    const add = (name, kind, bytes, rank, module, kept) => {
      // A profile of an earlier version has one line in place of a stack.
      const stack = rank < 0 ? [] : stacks.length ? stacks[stackOf[rank]] : [sources[rank]].filter(Boolean);
      rows.push({ name, kind, bytes, module, kept, stack, text: `${module} ${name} ${rank < 0 ? "" : ops[rank]} ${stack.join(" ")}`.toLowerCase() });
    };
    for (const id of statics) {
      const name = storageName[id], kind = storageKind[id];
      const module = kind === PARAMETER || kind === BUFFER ? name.slice(0, Math.max(0, name.lastIndexOf("."))) : "";
      if (run.bytes[id]) add(name, kind, run.bytes[id], -1, module, "there before and after the step");
    }
    for (let b = 0; b < run.start.length; b++) {
      if (run.start[b] > at || run.end[b] < at) continue;
      const id = run.storage[b], rank = run.order[run.start[b]];
      if (!run.bytes[id]) continue;
      const again = run.again[run.start[b]] && regions[rank] === "forward" ? ", rematerialized" : "";
      const kept = run.end[b] <= at ? "made or read now"
        : run.end[b] === last && run.isPinned.has(id) ? "live to the end of the step" : `read last by ${names[run.order[run.end[b]]]}`;
      add(storageName[id], storageKind[id], run.bytes[id], rank, modules[rank], kept + again);
    }
    const rank = run.order[at];
    if (run.inside[at]) add(`inside of ${names[rank]}`, OTHER, run.inside[at], rank, modules[rank], "while the op runs");
    return rows.sort((a, b) => b.bytes - a.bytes || (a.name < b.name ? -1 : 1));
  };

  // A tree of modules; a leaf is what one module has of one kind.
  const grow = (rows) => {
    const make = (name, path) => ({ name, path, bytes: 0, rows: [], children: new Map(), kind: null });
    const root = make("model", "");
    for (const row of rows) {
      let at = root;
      const visit = (node) => { node.bytes += row.bytes; node.rows.push(row); at = node; };
      visit(root);
      let path = "";
      for (const part of row.module ? row.module.split(".") : []) {
        path += (path && ".") + part;
        if (!at.children.has(part)) at.children.set(part, make(part, path));
        visit(at.children.get(part));
      }
      const leaf = `:${row.kind}`;
      if (!at.children.has(leaf)) at.children.set(leaf, { ...make(labels[row.kind], path + leaf), kind: row.kind });
      visit(at.children.get(leaf));
    }
    const fold = (node) => {
      for (const [key, child] of node.children) {
        let inner = child;
        while (inner.children.size === 1 && [...inner.children.values()][0].kind === null) {
          const [only] = inner.children.values();
          only.name = `${inner.name}.${only.name}`;
          inner = only;
        }
        node.children.set(key, inner);
        fold(inner);
      }
      const place = (child) => (child.kind === null ? firstRun.get(child.path) ?? Infinity : 1e15 + child.kind);
      node.children = [...node.children.values()].sort((a, b) => place(a) - place(b) || (a.path < b.path ? -1 : 1));
    };
    fold(root);
    return root;
  };
  // The nodes from the root to the deepest one whose path begins as `path` does.
  const down = (root, path) => {
    const trail = [root];
    for (;;) {
      const inside = (child) => path === child.path || path.startsWith(`${child.path}.`) || path.startsWith(`${child.path}:`) || child.path.startsWith(`${path}.`);
      const next = path && trail.at(-1).path !== path && trail.at(-1).children.find((child) => (child.kind === null ? inside(child) : child.path === path));
      if (!next) return trail;
      trail.push(next);
      if (next.path.length >= path.length) return trail;
    }
  };

  const byId = (id) => document.getElementById(id);
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const share = (bytes, whole) => `${((100 * bytes) / (whole || 1)).toFixed(1)} %`;
  const dark = (colour) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return 0.3 * r + 0.59 * g + 0.11 * b < 130;
  };
  const search = byId("live-search"), table = byId("live-tensors");
  const HIGH = 24, NARROWEST = 0.25, MOST_LINES = 8, MOST_INSIDE = 14, MOST_TENSORS = 60;
  let now = { key: runs.after ? "after" : "before", position: 0 };
  const unfolded = new Map();
  let zoomed = "", chosen = null, rows = [], root = null, tallest = 0, asked = false;

  const words = () => search.value.toLowerCase().split(/\s+/).filter(Boolean);
  // Kinds are found by a whole word: "act" is a module, "activations" a kind.
  const kindWords = labels.map((label) => label.split(" "));
  const isFound = (row, wanted) => wanted.every((word) => row.text.includes(word) || kindWords[row.kind].includes(word));
  const draw = () => {
    asked = false;
    const run = runs[now.key];
    rows = liveAt(run, now.position);
    root = grow(rows);
    const trail = down(root, zoomed), top = trail.at(-1).kind === null ? trail.at(-1) : trail.at(-2);
    const wanted = words(), found = wanted.length ? rows.filter((row) => isFound(row, wanted)) : [];
    const lit = new Set(found);
    describe(run);
    crumbs(trail.filter((node) => node.kind === null));
    frames(top, wanted.length ? lit : null);
    byId("live-found").textContent = wanted.length
      ? `${Format.bytes(found.reduce((sum, row) => sum + row.bytes, 0))} found, ${share(found.reduce((sum, row) => sum + row.bytes, 0), root.bytes)} of what is live, in ${found.length} tensor${found.length === 1 ? "" : "s"}`
      : "";
    const detail = chosen === null ? top : down(root, chosen).at(-1);
    inside(detail, wanted.length ? lit : null);
  };
  const ask = () => {
    if (!asked) requestAnimationFrame(draw);
    asked = true;
  };
  const describe = (run) => {
    const rank = run.order[now.position], again = run.again[now.position];
    const text = byId("live-when");
    text.replaceChildren(
      element("b", "", Format.bytes(root.bytes)), ` live ${run === runs.before && runs.after ? "in the baseline" : run.label === "baseline" ? "" : run.label}`,
      ` at ${Format.seconds(now.seconds || 0)}${now.isPeak ? ", its peak" : ""}: `, element("span", "mono", names[rank]),
      ` runs, ${regions[rank]}${again ? ` (${again})` : ""}`);
    byId("live-follow").hidden = !now.isPinned;
    const bar = byId("live-kinds");
    const bytes = labels.map((_, kind) => rows.reduce((sum, row) => sum + (row.kind === kind ? row.bytes : 0), 0));
    bar.firstElementChild.replaceChildren(...bytes.map((n, kind) => {
      const part = element("i");
      part.style.width = `${(100 * Math.max(0, n)) / (root.bytes || 1)}%`;
      part.style.backgroundColor = page.kinds[kind].colour;
      part.title = `${labels[kind]} ${Format.bytes(n)}`;
      return part;
    }));
    bar.lastElementChild.replaceChildren(...bytes.flatMap((n, kind) => {
      if (!n) return [];
      const item = element("li"), swatch = element("span", "swatch");
      swatch.style.background = page.kinds[kind].colour;
      item.append(swatch, `${labels[kind]} `, element("b", "", Format.bytes(n)));
      return [item];
    }));
  };
  const zoom = (path, focus) => {
    zoomed = path;
    chosen = null;
    draw();
    if (focus) (flame.querySelector("[tabindex='0']") || flame).focus();
  };
  const crumbs = (trail) => {
    byId("live-reset").disabled = !zoomed && chosen === null;
    byId("live-crumbs").replaceChildren(...trail.map((node, i) => {
      const item = element("li"), isLast = i === trail.length - 1, button = element("button", "crumb mono", node.name);
      button.type = "button";
      if (isLast) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => zoom(node.path));
      item.append(button);
      return item;
    }));
  };
  const frames = (top, lit) => {
    const made = [], focused = document.activeElement && document.activeElement.dataset && flame.contains(document.activeElement) ? document.activeElement.dataset.path : null;
    let deepest = 0;
    const place = (node, depth, left, parent) => {
      const width = (100 * Math.max(0, node.bytes)) / (top.bytes || 1);
      if (width < NARROWEST) return;
      deepest = Math.max(deepest, depth);
      const frame = element("button", node.kind === null ? `frame depth${depth % 2}` : "frame leaf");
      frame.type = "button";
      frame.tabIndex = -1;
      frame.dataset.path = node.path;
      frame.dataset.parent = parent;
      frame.dataset.depth = depth;
      Object.assign(frame.style, { left: `${left}%`, width: `${width}%`, top: `${HIGH * depth}px` });
      if (node.kind !== null) {
        frame.style.backgroundColor = page.kinds[node.kind].colour;
        frame.style.color = dark(page.kinds[node.kind].colour) ? "#fff" : "#10161c";
      }
      const title = `${node.kind === null ? node.path || "model" : `${node.path.split(":")[0] || "model"}: ${node.name}`}, ${Format.bytes(node.bytes)}, ${share(node.bytes, root.bytes)}`;
      frame.title = title;
      frame.setAttribute("aria-label", title);
      frame.setAttribute("aria-pressed", String(node.path === (chosen ?? zoomed)));
      if (lit) frame.classList.toggle("dim", !node.rows.some((row) => lit.has(row)));
      if (lit) frame.classList.toggle("lit", node.rows.every((row) => lit.has(row)));
      frame.append(element("span", "", node.name));
      made.push(frame);
      let at = left;
      for (const child of node.children) {
        place(child, depth + 1, at, node.path);
        at += (100 * Math.max(0, child.bytes)) / (top.bytes || 1);
      }
    };
    place(top, 0, 0, "");
    tallest = Math.max(tallest, HIGH * (deepest + 1));
    flame.style.height = `${tallest}px`;
    flame.replaceChildren(...made);
    const first = made.find((frame) => frame.dataset.path === focused) || made[0];
    if (first) first.tabIndex = 0;
    if (first && focused !== null) first.focus({ preventScroll: true });
  };
  const sum = (list) => list.reduce((total, row) => total + row.bytes, 0);
  const inside = (node, lit) => {
    const shown = lit ? node.rows.filter((row) => lit.has(row)) : node.rows;
    const owner = node.path.split(":")[0], title = node.kind === null ? node.path || "model" : `${owner || "model"}: ${node.name}`;
    byId("live-inside-head").textContent = `${title}, ${Format.bytes(node.bytes)}`;
    const children = [...node.children].map((child) => ({ child, bytes: lit ? sum(child.rows.filter((row) => lit.has(row))) : child.bytes }))
      .filter((each) => each.bytes).sort((a, b) => b.bytes - a.bytes);
    const list = byId("live-inside");
    const row = (bytes, label, colour, act) => {
      const item = element("li"), line = element(act ? "button" : "p", "inside");
      if (act) { line.type = "button"; line.addEventListener("click", act); }
      const name = element("span", "mono"), bar = element("span", "bar"), part = element("i");
      name.append(...label.split(".").flatMap((piece, i) => (i ? [".", element("wbr"), piece] : [piece])));
      part.style.width = `${Math.max(0, (100 * bytes) / (node.bytes || 1))}%`;
      part.style.backgroundColor = colour;
      bar.append(part);
      line.append(name, bar, element("b", "", Format.bytes(bytes)));
      item.append(line);
      return item;
    };
    const accent = "var(--accent)";
    list.replaceChildren(...(node.kind === null
      ? children.slice(0, MOST_INSIDE).map(({ child, bytes }) => row(bytes, child.name, child.kind === null ? accent : page.kinds[child.kind].colour,
        () => (child.kind === null ? zoom(child.path) : (chosen = child.path, draw()))))
      : shown.slice(0, MOST_INSIDE).map((each) => row(each.bytes, each.name, page.kinds[each.kind].colour))));
    const rest = (node.kind === null ? children.length : shown.length) - MOST_INSIDE;
    if (rest > 0) list.append(element("li", "muted small", `and ${rest} more`));
    const groups = new Map();
    for (const each of shown) {
      if (!each.stack.length) continue;
      const key = each.stack.join("\n"), group = groups.get(key) || { stack: each.stack, bytes: 0, count: 0 };
      group.bytes += each.bytes; group.count += 1;
      groups.set(key, group);
    }
    const ranked = [...groups.values()].sort((a, b) => b.bytes - a.bytes || (a.stack.join() < b.stack.join() ? -1 : 1));
    const other = sum(shown) - sum(ranked);
    byId("live-stacks").replaceChildren(...ranked.slice(0, MOST_LINES).map((group, i) => {
      const item = element("li"), box = element("details"), head = element("summary", "leaf"), size = element("span");
      size.append(element("b", "", Format.bytes(group.bytes)), element("span", "muted", ` × ${group.count}`));
      head.append(element("span", "mono", group.stack.at(-1)), size);
      box.append(head);
      for (const line of group.stack.slice(0, -1).reverse()) box.append(element("p", "mono muted caller", `called by ${line}`));
      if (group.stack.length === 1) box.append(element("p", "muted caller", "the model's own forward"));
      const key = group.stack.join("\n");
      box.open = unfolded.get(key) ?? (i === 0 && Boolean(zoomed || chosen));
      head.addEventListener("click", () => unfolded.set(key, !box.open));
      item.append(box);
      return item;
    }), ...(ranked.length > MOST_LINES ? [element("li", "muted small", `and ${ranked.length - MOST_LINES} more lines`)] : []),
      ...(other > 0 ? [element("li", "muted small", `${Format.bytes(other)} come from no known line of the model, such as parameters, optimizer state and batch`)] : []));
    table.querySelector("summary").textContent = `Tensors of ${title}: the largest ${Math.min(MOST_TENSORS, shown.length)} of ${shown.length}`;
    if (table.open) tensors(shown);
    table.shown = shown;
  };
  const tensors = (shown) => table.querySelector("tbody").replaceChildren(...shown.slice(0, MOST_TENSORS).map((each) => {
    const line = element("tr");
    for (const [label, text, className] of [["Tensor", each.name, "mono"], ["Size", Format.bytes(each.bytes), "num"], ["Kind", labels[each.kind], ""],
      ["Module", each.module, "mono"], ["Live because", each.kept, ""]]) {
      const cell = element("td", className, text);
      cell.dataset.label = label;
      line.append(cell);
    }
    return line;
  }));
  table.addEventListener("toggle", () => table.open && tensors(table.shown || []));

  flame.addEventListener("click", (event) => {
    const frame = event.target.closest(".frame");
    if (!frame) return;
    const path = frame.dataset.path, isTop = frame.dataset.depth === "0";
    if (path.includes(":")) { chosen = path; draw(); }
    else if (isTop && zoomed) zoom(down(root, zoomed).filter((node) => node.kind === null).slice(0, -1).at(-1)?.path ?? "", true);
    else zoom(path, true);
  });
  flame.addEventListener("keydown", (event) => {
    const frame = event.target.closest(".frame");
    if (!frame) return;
    const all = [...flame.querySelectorAll(".frame")];
    const level = all.filter((each) => each.dataset.depth === frame.dataset.depth);
    const at = level.indexOf(frame), depth = Number(frame.dataset.depth);
    if (event.key === "Escape") { event.preventDefault(); return zoom("", true); }
    const next = {
      ArrowLeft: level[at - 1], ArrowRight: level[at + 1],
      ArrowUp: all.find((each) => each.dataset.path === frame.dataset.parent && Number(each.dataset.depth) === depth - 1),
      ArrowDown: all.find((each) => each.dataset.parent === frame.dataset.path && Number(each.dataset.depth) === depth + 1),
    };
    if (!(event.key in next)) return;
    event.preventDefault();
    if (!next[event.key]) return;
    frame.tabIndex = -1;
    next[event.key].tabIndex = 0;
    next[event.key].focus();
  });
  byId("live-reset").addEventListener("click", () => zoom(""));
  search.addEventListener("input", ask);
  document.addEventListener("lowtide:time", (event) => { now = event.detail; ask(); });
});
