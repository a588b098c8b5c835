// The curve of peak against time, and what changes from one of its plans to the next.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("tradeoff-chart");
  const page = JSON.parse(document.getElementById("report-data").textContent);
  if (!box || !page.tradeoff) return;
  const data = page.tradeoff;
  const points = data.points.map((point) => ({
    peak: point.peak, overhead: point.overhead, least: point.least, measured: point.measured, recomputed: new Set(Decode.integers(point.recomputed)),
    offloaded: Decode.integers(point.offloaded),
  }));
  for (const point of points) point.gone = new Set([...point.recomputed, ...point.offloaded]);
  const brought = points.some((point) => point.offloaded.length) ? "Recomputed or offloaded" : "Recomputed";
  const sizes = Decode.integers(data.sizes);
  const slider = document.getElementById("tradeoff-slider");
  let selected = data.selected;
  // The plan that was made stands beside the curve where the curve does not have it.
  const made = data.made === null ? null : points[data.made], curve = points.filter((p) => p !== made || data.made_on_curve);

  const measured = points.filter((point) => point.measured);
  const plain = data.without_offload;
  const xs = [...new Set([...points.map((p) => p.peak), ...measured.map((p) => p.measured[0]), ...plain.map(([peak]) => peak)])].sort((a, b) => a - b);
  const column = (pairs) => {
    const values = new Map(pairs);
    return xs.map((x) => (values.has(x) ? values.get(x) : null));
  };
  const columns = [xs, column(curve.map((p) => [p.peak, p.overhead * 100])), column(measured.map((p) => [p.measured[0], p.measured[1] * 100])),
    column(curve.filter((p) => p.least !== null).map((p) => [p.peak, p.least * 100])), column(plain.map(([peak, overhead]) => [peak, overhead * 100]))];
  const top = Math.max(1, ...columns[1], ...columns[2], ...columns[4]) * 1.12;
  const bottom = Math.min(0, ...columns[2]) * 1.12 - top * 0.06;
  const margin = (xs.at(-1) - xs[0]) * 0.04 || xs[0] * 0.1 || 1;

  const decorate = (u) => {
    const ctx = u.ctx, ratio = devicePixelRatio, { left, top: y0, width, height } = u.bbox;
    ctx.save();
    ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    if (data.budget) {
      const x = u.valToPos(data.budget, "x", true);
      if (x > left && x < left + width) {
        ctx.strokeStyle = ctx.fillStyle = Theme.colour("--bad");
        ctx.lineWidth = ratio;
        ctx.setLineDash([5 * ratio, 4 * ratio]);
        ctx.beginPath(); ctx.moveTo(x, y0); ctx.lineTo(x, y0 + height); ctx.stroke();
        const fits = x + ctx.measureText("budget").width + 8 * ratio < left + width;
        ctx.textAlign = fits ? "left" : "right";
        ctx.fillText("budget", x + (fits ? 5 : -5) * ratio, y0 + 12 * ratio);
        ctx.setLineDash([]);
      }
    }
    if (made) {
      const x = u.valToPos(made.peak, "x", true), y = u.valToPos(made.overhead * 100, "y", true), r = 6 * ratio;
      ctx.fillStyle = Theme.colour("--recompute");
      ctx.beginPath(); ctx.moveTo(x, y - r); ctx.lineTo(x + r, y); ctx.lineTo(x, y + r); ctx.lineTo(x - r, y); ctx.fill();
      const words = "this plan", wide = ctx.measureText(words).width, fits = x + wide + 20 * ratio < left + width;
      ctx.textAlign = "left"; ctx.strokeStyle = Theme.colour("--card"); ctx.lineWidth = 4 * ratio;
      const place = [fits ? x + 12 * ratio : x - wide - 12 * ratio, Math.max(y - 10 * ratio, y0 + 26 * ratio)];
      ctx.strokeText(words, ...place);
      ctx.fillText(words, ...place);
    }
    const at = points[selected];
    ctx.strokeStyle = Theme.colour("--recompute"); ctx.lineWidth = 3 * ratio;
    ctx.beginPath(); ctx.arc(u.valToPos(at.peak, "x", true), u.valToPos(at.overhead * 100, "y", true), 8 * ratio, 0, 7); ctx.stroke();
    ctx.restore();
  };
  const height = () => (innerWidth < 700 ? 240 : 300);
  const dots = (size) => ({ show: true, size, fill: (u, i) => Theme.colour(i === 1 ? "--accent" : "--card") });
  const chart = new uPlot({
    width: box.clientWidth, height: height(), padding: [14, 30, 0, 0], legend: { show: false },
    scales: { x: { time: false, range: () => [xs[0] - margin, xs.at(-1) + margin] }, y: { range: () => [bottom, top] } },
    cursor: { drag: { x: false, y: false }, points: { show: false } },
    series: [
      {},
      { label: "simulated", stroke: () => Theme.colour("--accent"), width: 2, spanGaps: true, points: dots(6) },
      { label: "measured", stroke: () => Theme.colour("--before"), width: 2, paths: () => null, points: { ...dots(9), width: 2 } },
      { label: "no plan adds less", stroke: () => Theme.colour("--muted"), width: 1, dash: [4, 4], spanGaps: true, points: { show: false } },
      { label: "without offload", stroke: () => Theme.colour("--recompute"), width: 2, spanGaps: true, points: { ...dots(5), fill: () => Theme.colour("--card") } },
    ],
    axes: [
      byteAxis({ label: "peak memory", labelSize: 22, labelFont: "12px system-ui" }),
      chartAxis({ size: 60, values: (u, splits) => splits.map((y) => (y < 0 ? "−" : "+") + Math.abs(y) + " %"), label: "time added", labelSize: 22, labelFont: "12px system-ui" }),
    ],
    hooks: { draw: [decorate] },
  }, columns, box);

  const fill = (list, heading, indices, words) => {
    const sorted = [...indices].sort((a, b) => sizes[b] - sizes[a] || a - b);
    const total = sorted.reduce((sum, i) => sum + sizes[i], 0);
    heading.textContent = `${words}: ${sorted.length}` + (sorted.length ? `, ${Format.bytes(total)}` : "");
    list.replaceChildren(...sorted.map((i) => {
      const item = document.createElement("li"), name = document.createElement("span"), size = document.createElement("span");
      name.className = "mono";
      name.textContent = data.names[i];
      size.textContent = Format.bytes(sizes[i]);
      item.append(name, size);
      return item;
    }));
  };
  const byId = (id) => document.getElementById(id);
  const select = (index) => {
    selected = index;
    const at = points[index], from = index + 1 < points.length ? points[index + 1] : { gone: new Set() };
    slider.value = String(index);
    const total = [...at.recomputed].reduce((sum, i) => sum + sizes[i], 0);
    const words = `${at === made ? "this plan, " : ""}plan ${index + 1} of ${points.length}: peak ${Format.bytes(at.peak)}, time ${Format.percent(at.overhead)}, ` +
      `${at.recomputed.size} ${at.recomputed.size === 1 ? "activation" : "activations"} recomputed (${Format.bytes(total)})` +
      (at.offloaded.length ? `, ${at.offloaded.length} offloaded (${Format.bytes(at.offloaded.reduce((sum, i) => sum + sizes[i], 0))})` : "") +
      (at.least === null ? "" : `; no plan adds less than ${Format.percent(at.least)} (dashed, proven)`) +
      (at.measured ? `; measured ${Format.bytes(at.measured[0])}, ${Format.percent(at.measured[1])}` : "");
    byId("tradeoff-text").textContent = words;
    slider.setAttribute("aria-valuetext", words);
    const added = [...at.gone].filter((i) => !from.gone.has(i));
    const kept = [...from.gone].filter((i) => !at.gone.has(i));
    const than = index + 1 < points.length ? "in the next plan with more memory" : "in the baseline";
    fill(byId("tradeoff-added"), byId("tradeoff-added-head"), added, `${brought} here, kept ${than}`);
    byId("tradeoff-same").hidden = added.length + kept.length > 0 || index + 1 === points.length;
    fill(byId("tradeoff-kept"), byId("tradeoff-kept-head"), kept, `Kept here, ${brought.toLowerCase()} ${than}`);
    chart.redraw(false);
  };
  slider.addEventListener("input", () => select(Number(slider.value)));
  box.addEventListener("click", () => {
    const x = chart.cursor.left, y = chart.cursor.top;
    const distance = (p) => Math.hypot(chart.valToPos(p.peak, "x") - x, chart.valToPos(p.overhead * 100, "y") - y);
    const near = points.reduce((best, p, i) => (distance(p) < distance(points[best]) ? i : best), 0);
    select(near);
  });
  const back = byId("tradeoff-made");
  if (back) back.addEventListener("click", () => select(data.made));
  Theme.onChange(() => chart.redraw(false));
  fitChart(chart, box, height);
  select(selected);
});
