// The other half of embed.py, and how numbers are written.
"use strict";
const Decode = {
  // Base64 of zigzag-encoded differences, seven bits to a byte. Bytes of memory pass 2^32, so no shifts.
  integers(text) {
    const packed = atob(text);
    const values = [];
    let previous = 0, rest = 0, scale = 1;
    for (let i = 0; i < packed.length; i++) {
      const byte = packed.charCodeAt(i);
      rest += (byte & 127) * scale;
      scale *= 128;
      if (byte < 128) {
        previous += rest % 2 ? -(rest + 1) / 2 : rest / 2;
        values.push(previous);
        rest = 0;
        scale = 1;
      }
    }
    return values;
  },
  strings(packed) {
    return Decode.integers(packed.index).map((i) => packed.table[i]);
  },
};
const Format = {
  bytes(n) {
    const digits = { B: 0, KiB: 1, MiB: 1, GiB: 2 };
    for (const unit in digits) {
      if (Math.abs(n) < 1024) return n.toFixed(digits[unit]) + " " + unit;
      n /= 1024;
    }
    return n.toFixed(3) + " TiB";
  },
  tick: (n) => Format.bytes(n).replace(/\.0+ /, " "),
  seconds(s) {
    if (s >= 1) return s.toFixed(2) + " s";
    if (s >= 1e-3) return (s * 1e3).toFixed(s >= 0.1 ? 0 : 1) + " ms";
    return (s * 1e6).toFixed(s >= 1e-5 ? 0 : 1) + " µs";
  },
  percent: (share) => (share >= 0 ? "+" : "−") + Math.abs(share * 100).toFixed(1) + " %",
};
// Round steps in binary units, so that an axis reads 256 MiB and not 268.4.
const byteSplits = (u, axis, low, high) => {
  const pixels = (axis ? u.bbox.height / 50 : u.bbox.width / 84) / devicePixelRatio;
  const rough = (high - low) / Math.max(1, pixels);
  let step = 1;
  while (step < rough) step *= 2;
  const splits = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) splits.push(at);
  return splits;
};
const chartAxis = (extra) => ({
  stroke: () => Theme.colour("--muted"),
  grid: { stroke: () => Theme.colour("--grid"), width: 1 },
  ticks: { stroke: () => Theme.colour("--grid"), width: 1 },
  font: "12px system-ui, sans-serif",
  ...extra,
});
const fitChart = (chart, box, height) => {
  new ResizeObserver(() => {
    const width = box.clientWidth;
    if (width && width !== chart.width) chart.setSize({ width, height: height() });
  }).observe(box);
};
