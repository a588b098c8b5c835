// The timelines of two runs in one chart.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const box = document.getElementById("diff-chart");
  const page = JSON.parse(document.getElementById("report-data").textContent);
  if (!box) return;
  const lines = page.lines.map((packed) => ({
    ...packed, starts: Decode.integers(packed.starts).map((ns) => ns / 1e9), bytes: Decode.integers(packed.bytes),
    names: Decode.strings(packed.names), modules: Decode.strings(packed.modules),
  }));
  let axis = "time", xs = [], positions = [], current = 0;
  const scale = (line) => (axis === "time" ? 1 : 100 / (line.starts.at(-1) || 1));
  // At every place of any line: where each line is then; -1 after its end.
  const merge = () => {
    xs = [...new Set(lines.flatMap((line) => line.starts.map((s) => s * scale(line))))].sort((a, b) => a - b);
    positions = lines.map((line) => {
      let at = 0;
      const factor = scale(line), end = line.bytes.length;
      return xs.map((x) => {
        while (at < end && line.starts[at + 1] * factor <= x) at++;
        return at < end ? at : -1;
      });
    });
  };
  const series = () => [xs, ...lines.map((line, i) => positions[i].map((p) => (p < 0 ? null : line.bytes[p])))];
  const colour = (line) => Theme.colour(line.run === "A" ? "--run-a" : "--run-b");
  const highest = Math.max(...lines.map((line) => line.bytes[line.peak])) * 1.1;
  const decorate = (u) => {
    const ctx = u.ctx, ratio = devicePixelRatio, { left, width } = u.bbox;
    ctx.save();
    ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    const written = [];
    const write = (text, x, y) => {
      const wide = ctx.measureText(text).width, place = Math.max(left, Math.min(x, left + width - wide));
      let base = y;
      while (written.some(([a, b, c]) => place < b && place + wide > a && Math.abs(c - base) < 14 * ratio)) base += 15 * ratio;
      written.push([place, place + wide, base]);
      ctx.strokeStyle = Theme.colour("--card"); ctx.lineWidth = 4 * ratio;
      ctx.strokeText(text, place, base);
      ctx.fillText(text, place, base);
    };
    for (const line of lines) {
      const x = u.valToPos(line.starts[line.peak] * scale(line), "x", true), y = u.valToPos(line.bytes[line.peak], "y", true);
      if (x < left || x > left + width) continue;
      ctx.fillStyle = colour(line);
      ctx.beginPath(); ctx.arc(x, y, 4 * ratio, 0, 7); ctx.fill();
      write(Format.bytes(line.bytes[line.peak]), x + 8 * ratio, y - 6 * ratio);
    }
    for (const budget of page.budgets) {
      if (budget > highest) continue;
      const y = u.valToPos(budget, "y", true);
      ctx.strokeStyle = ctx.fillStyle = Theme.colour("--bad"); ctx.lineWidth = ratio; ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath(); ctx.moveTo(left, y); ctx.lineTo(left + width, y); ctx.stroke(); ctx.setLineDash([]);
      write("budget " + Format.bytes(budget), left + 6 * ratio, y - 5 * ratio);
    }
    ctx.restore();
  };
  const rows = [...document.querySelectorAll("#diff-readout tbody tr")];
  const show = (i) => {
    current = i;
    rows.forEach((row, l) => {
      const line = lines[l], p = positions[l][i];
      const texts = p < 0 ? ["ended", "", ""] : [Format.bytes(line.bytes[p]), line.names[p], line.modules[p]];
      texts.forEach((text, c) => { row.cells[c + 1].textContent = text || "–"; });
    });
  };
  const floor = (x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle - 1;
    }
    return low;
  };
  merge();
  const stepped = uPlot.paths.stepped({ align: 1 });
  const height = () => (innerWidth < 700 ? 300 : 400);
  const chart = new uPlot({
    width: box.clientWidth, height: height(), padding: [18, 32, 0, 0], legend: { show: false },
    scales: { x: { time: false }, y: { range: () => [0, highest] } },
    cursor: { drag: { x: true, y: false }, y: false, points: { show: false } },
    series: [{}, ...lines.map((line) => ({
      label: line.label, width: line.is_plan ? 2 : 1.25, dash: line.is_plan ? undefined : [5, 4], paths: stepped, points: { show: false }, stroke: () => colour(line),
    }))],
    axes: [
      chartAxis({ space: 72, values: (u, splits) => splits.map((x) => (axis === "time" ? (x ? Format.seconds(x) : "0") : `${x} %`)) }),
      byteAxis({ size: 74 }),
    ],
    hooks: { draw: [decorate], setCursor: [(u) => u.cursor.left >= 0 && show(floor(u.posToVal(u.cursor.left, "x")))] },
  }, series(), box);
  const reset = () => {
    const line = lines.findLast((each) => each.is_plan) || lines[0];
    show(floor(line.starts[line.peak] * scale(line)));
  };
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      for (const each of document.querySelectorAll("[data-axis]")) each.setAttribute("aria-pressed", String(each === button));
      axis = button.dataset.axis;
      merge();
      chart.setData(series());
      reset();
    });
  }
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: xs.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const i = Math.max(0, Math.min(xs.length - 1, moves[event.key]));
    chart.setCursor({ left: chart.valToPos(xs[i], "x"), top: 10 }, false);
    show(i);
  });
  Theme.onChange(() => chart.redraw(false));
  fitChart(chart, box, height);
  reset();
});
