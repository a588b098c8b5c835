// The other half of page_packing.py, and how numbers are written.
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
  // Ties go to the even digit, as in the figures that Python writes.
  fixed(n, digits) {
    const whole = n * 10 ** digits;
    return (whole % 1 === 0.5 && Math.floor(whole) % 2 === 0 ? Math.floor(whole) / 10 ** digits : n).toFixed(digits);
  },
  bytes(n) {
    const digits = { B: 0, KiB: 1, MiB: 1, GiB: 2 };
    for (const unit in digits) {
      if (Math.abs(n) < 1024) return Format.fixed(n, digits[unit]) + " " + unit;
      n /= 1024;
    }
    return Format.fixed(n, 3) + " TiB";
  },
  seconds(s) {
    if (s >= 1) return s.toFixed(2) + " s";
    if (s >= 1e-3) return (s * 1e3).toFixed(s >= 0.1 ? 0 : 1) + " ms";
    return (s * 1e6).toFixed(s >= 1e-5 ? 0 : 1) + " µs";
  },
  percent: (share) => (share >= 0 ? "+" : "−") + Math.abs(share * 100).toFixed(1) + " %",
};
// An axis of bytes in one binary unit, with round numbers of it: 200 MiB, 400 MiB, and not 190.7.
const byteAxis = (extra) => {
  const unitFor = (high) => {
    const names = ["GiB", "MiB", "KiB", "B"];
    const power = [3, 2, 1, 0].find((p) => high >= 2 * 1024 ** p) || 0;
    return { name: names[3 - power], bytes: 1024 ** power };
  };
  return chartAxis({
    splits: (u, axis, low, high) => {
      const room = Math.max(1, (axis ? u.bbox.height / 48 : u.bbox.width / 72) / devicePixelRatio);
      const unit = unitFor(high).bytes, rough = (high - low) / unit / room;
      const ten = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 2.5, 4, 5, 10].find((n) => n * ten >= rough) * ten * unit;
      const splits = [];
      for (let i = Math.max(0, Math.ceil(low / step)); i * step <= high; i++) splits.push(i * step);
      return splits;
    },
    values: (u, splits) => {
      const unit = unitFor(splits.at(-1));
      return splits.map((n) => (n ? Number((n / unit.bytes).toPrecision(6)) + " " + unit.name : "0"));
    },
    ...extra,
  });
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
