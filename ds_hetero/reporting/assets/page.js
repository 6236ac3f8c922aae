"use strict";
// Draws the charts of the page and answers its sliders. All numbers come from the file; nothing is predicted here.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const palette = ["#6f86c9", "#e08a3c", "#2a9d73", "#d06fb0", "#8a6d4b", "#39a5c4", "#c9b037", "#b3524a"];

  function seconds(value) {
    if (value === 0) return "0";
    if (value >= 100) return value.toFixed(0) + " s";
    if (value >= 1) return value.toPrecision(3) + " s";
    if (value >= 1e-3) return (value * 1e3).toPrecision(3) + " ms";
    return (value * 1e6).toPrecision(3) + " µs";
  }

  function style() {
    const ink = colour("ink"), soft = colour("soft"), line = colour("line");
    const axis = { axisLabel: { color: soft, hideOverlap: true }, axisLine: { lineStyle: { color: line } }, splitLine: { lineStyle: { color: line } }, nameTextStyle: { color: soft } };
    return {
      axis,
      base: {
        animation: false,
        aria: { enabled: false },
        textStyle: { fontFamily: "system-ui, sans-serif", color: ink },
        legend: { type: "plain", textStyle: { color: ink }, top: 0, left: 0, itemWidth: 14, itemHeight: 10 },
        tooltip: { backgroundColor: colour("box"), borderColor: line, textStyle: { color: ink }, confine: true, renderMode: "richText" },
      },
    };
  }

  const narrow = (width) => width < 560;
  const short = (text, width) => (narrow(width) && text.length > 16 ? text.slice(0, 7) + "…" + text.slice(-8) : text);

  // {rows: [name], unit, series: [{name, values, colour, stack}], marks: [{name, value}]}: horizontal bars, a row per name
  function bars(chart, spec, width) {
    const { base, axis } = style();
    return {
      ...base,
      legend: { ...base.legend, data: spec.series.map((one) => one.name) },
      tooltip: { ...base.tooltip, trigger: "axis", axisPointer: { type: "shadow" } },
      grid: { left: 8, right: 16, top: narrow(width) ? 64 : 36, bottom: 8, containLabel: true },
      xAxis: { type: "value", name: "", ...axis, axisLabel: { ...axis.axisLabel, formatter: (value) => (spec.unit === "s" ? seconds(value) : value.toLocaleString("en") + (spec.unit ? " " + spec.unit : "")) } },
      // Bars of one axis stand beside each other: what lies behind the others, such as a card's memory, has an axis of its own.
      yAxis: [
        { type: "category", inverse: true, data: spec.rows, ...axis, axisLabel: { ...axis.axisLabel, formatter: (text) => short(text, width) } },
        { type: "category", inverse: true, data: spec.rows, show: false },
      ],
      series: spec.series.map((one, i) => ({
        type: "bar", name: one.name, data: one.values, stack: one.stack, barMaxWidth: one.behind ? 52 : 22,
        yAxisIndex: one.behind ? 1 : 0, barCategoryGap: one.behind ? "10%" : "30%", z: one.behind ? 1 : 2,
        itemStyle: { color: one.colour ? colour(one.colour) : palette[i % palette.length], opacity: one.behind ? 0.45 : 1 },
      })),
    };
  }

  // {x: [..], xName, unit, series: [{name, values}]}
  function lines(chart, spec, width) {
    const { base, axis } = style();
    return {
      ...base,
      legend: { ...base.legend, data: spec.series.map((one) => one.name) },
      tooltip: { ...base.tooltip, trigger: "axis" },
      grid: { left: 8, right: 24, top: narrow(width) ? 72 : 40, bottom: 24, containLabel: true },
      xAxis: { type: "category", data: spec.x.map(String), name: spec.xName, nameLocation: "middle", nameGap: 26, ...axis },
      yAxis: { type: "value", ...axis, axisLabel: { ...axis.axisLabel, formatter: (value) => (spec.unit === "s" ? seconds(value) : value.toLocaleString("en")) } },
      series: spec.series.map((one, i) => ({ type: "line", name: one.name, data: one.values, symbolSize: 6, lineStyle: { type: one.dashed ? "dashed" : "solid" }, itemStyle: { color: palette[i % palette.length] } })),
    };
  }

  // {rows: [name], kinds: [name], bars: [[row, kind, start_s, stop_s]]}: what follows what, a row per name
  function timeline(chart, spec, width) {
    const { base, axis } = style();
    const draw = (params, api) => {
      const begin = api.coord([api.value(2), api.value(0)]), end = api.coord([api.value(3), api.value(0)]);
      const height = Math.min(api.size([0, 1])[1] * 0.72, 26);
      const shape = { x: begin[0], y: begin[1] - height / 2, width: Math.max(end[0] - begin[0], 0.5), height };
      return { type: "rect", shape, style: { fill: colour(spec.kinds[api.value(1)]) } };
    };
    return {
      ...base,
      legend: { ...base.legend, data: spec.kinds },
      tooltip: { ...base.tooltip, formatter: (one) => spec.rows[one.value[0]] + ": " + spec.kinds[one.value[1]] + " " + seconds(one.value[3] - one.value[2]) },
      grid: { left: 8, right: 24, top: narrow(width) ? 64 : 36, bottom: 8, containLabel: true },
      xAxis: { type: "value", min: 0, max: Math.max(...spec.bars.map((bar) => bar[3])), ...axis, axisLabel: { ...axis.axisLabel, formatter: seconds, showMaxLabel: false } },
      yAxis: { type: "category", inverse: true, data: spec.rows, ...axis, axisLabel: { ...axis.axisLabel, formatter: (text) => short(text, width) } },
      series: spec.kinds.map((kind, number) => ({
        type: "custom", name: kind, renderItem: draw, encode: { x: [2, 3], y: 0 }, clip: true,
        itemStyle: { color: colour(kind) }, data: spec.bars.filter((bar) => bar[1] === number),
      })),
    };
  }

  // {columns, machines: [name], nodes: [{name, text, group, machine, x, line, size}], links: [[from, to, text, isRing]]}
  function links(chart, spec, width) {
    const { base } = style();
    const ink = colour("ink"), soft = colour("soft");
    const columns = narrow(width) ? 1 : spec.columns, rows = Math.ceil(spec.machines.length / columns);
    const head = 58, line = 66, side = 16, box = (width - 2 * side) / columns, bulge = 26;
    const rowOf = (machine) => Math.floor(machine / columns);
    const tops = [0];
    for (let row = 0; row < rows; row++) {
      const lines = spec.nodes.filter((node) => rowOf(node.machine) === row).map((node) => node.line + 1);
      tops.push(tops[row] + head + line * Math.max(...lines));
    }
    chart.getDom().style.height = tops[rows] + "px";
    chart.resize();
    const at = (node) => [((node.machine % columns) + 0.1 + 0.8 * node.x) * box, tops[rowOf(node.machine)] + head + line * node.line];
    const place = Object.fromEntries(spec.nodes.map((node) => [node.name, at(node)]));
    // An arc leaves its line by at most `bulge` pixels, so that it stays clear of the names above and below.
    const curve = (source, target) => Math.min(0.2, 2 * bulge / Math.hypot(place[source][0] - place[target][0], place[source][1] - place[target][1]));
    // A link's arc rises above the ranks that it passes, and its text with it.
    const above = (source, target) => Math.sign(place[target][0] - place[source][0]) * curve(source, target);
    const written = { backgroundColor: colour("ground"), padding: [1, 2] };
    const hidden = (max) => ({ type: "value", show: false, min: 0, max });
    return {
      ...base,
      legend: { show: false },
      tooltip: { ...base.tooltip, formatter: (one) => one.data.text || "" },
      grid: { left: side, right: side, top: 0, bottom: 0 },
      xAxis: hidden(columns * box),
      yAxis: { ...hidden(tops[rows]), inverse: true },
      series: [{
        type: "graph", layout: "none", coordinateSystem: "cartesian2d", roam: false,
        label: { ...written, show: true, color: ink, position: "bottom", fontSize: narrow(width) ? 10 : 12, formatter: (one) => one.data.text },
        edgeLabel: { ...written, show: true, color: soft, fontSize: 11, formatter: (one) => one.data.text },
        data: [
          ...spec.machines.map((name, machine) => ({ name: "machine " + machine, text: name, value: [((machine % columns) + 0.02) * box, tops[rowOf(machine)] + 14], symbolSize: 0.1, label: { position: "right", fontWeight: "bold" } })),
          ...spec.nodes.map((node) => ({ name: node.name, text: node.text, value: place[node.name], symbolSize: node.size, itemStyle: { color: palette[node.group % palette.length] } })),
        ],
        links: spec.links.map(([source, target, text, isRing]) => ({
          source, target, text, symbol: isRing ? ["none", "arrow"] : ["none", "none"], symbolSize: 9,
          lineStyle: { color: isRing ? colour("accent") : soft, width: isRing ? 2 : 1, type: isRing ? "solid" : "dashed", curveness: isRing ? curve(source, target) : above(source, target) },
          label: { show: Boolean(text) && Math.abs(place[source][0] - place[target][0]) > 100 },  // else over the names
        })),
      }],
    };
  }

  const kinds = { bars, lines, timeline, links };
  const drawn = data.charts.map((spec, number) => {
    const place = document.getElementById("chart-" + number);
    const chart = echarts.init(place, null, { renderer: "svg" });
    const draw = () => { chart.resize(); chart.setOption(kinds[spec.kind](chart, spec.data, place.clientWidth), true); };
    draw();
    return draw;
  });
  const redraw = () => drawn.forEach((draw) => draw());
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  const grid = data.grid;
  if (!grid) return;
  const inputs = ["length", "link", "removal"].map((name) => document.getElementById("slide-" + name));
  const today = [grid.lengths.indexOf(grid.today), grid.links.indexOf(1), 0];

  function element(tag, text, parent, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    if (parent) parent.appendChild(made);
    return made;
  }

  function pointAt([length, link, removal]) {
    return grid.points[(removal * grid.links.length + link) * grid.lengths.length + length];
  }

  function answerRows(answer) {
    if (!answer) return ["-", "-", "-", "nothing fits, or not searched: more than one slider has moved"];
    if (answer.step_s === undefined) return ["-", "-", "-", answer.reason];
    return [seconds(answer.step_s), Math.round(answer.tokens_per_s).toLocaleString("en"), seconds(answer.block_s), answer.reason ? "does not fit: " + answer.reason : answer.bottleneck];
  }

  function show() {
    const place = inputs.map((input) => Number(input.value));
    const texts = [grid.lengths[place[0]].toLocaleString("en") + " tokens", "× " + grid.links[place[1]] + " (" + grid.link_text[place[1]] + ")", grid.removals[place[2]]];
    texts.forEach((text, i) => {
      document.getElementById(inputs[i].id + "-text").textContent = text;
      inputs[i].setAttribute("aria-valuetext", text);
    });
    const point = pointAt(place), out = document.getElementById("slid");
    out.replaceChildren();
    out.dataset.point = JSON.stringify(point);
    const box = element("div", undefined, out, "scroll");
    const table = element("table", undefined, box);
    const head = element("tr", undefined, element("thead", undefined, table));
    ["", "a step", "tokens/s", "a block", "what decides"].forEach((text, i) => element("th", text, head, i === 4 ? "text" : ""));
    const body = element("tbody", undefined, table);
    const kept = place[2] ? "here, as planned without it today" : "here, this plan";
    const rows = [["today, this plan", pointAt(today).this], [kept, point.this], ["here, planned anew", point.anew]];
    for (const [name, answer] of rows) {
      const row = element("tr", undefined, body);
      element("th", name, row);
      answerRows(answer).forEach((text, i) => element("td", text, row, i === 3 ? (answer && answer.reason ? "text bad" : "text") : ""));
    }
    const answer = point.anew && point.anew.ranks ? point.anew : point.this;
    if (!answer || !answer.ranks || !answer.ranks.length) return;
    element("h3", answer === point.anew ? "Ranks of the plan made anew" : "Ranks of this plan", out);
    const ranks = element("table", undefined, element("div", undefined, out, "scroll"));
    const titles = element("tr", undefined, element("thead", undefined, ranks));
    ["rank", "device", "tokens", "heads", "memory, GiB"].forEach((text) => element("th", text, titles));
    const list = element("tbody", undefined, ranks);
    answer.ranks.forEach(([device, tokens, heads, memory], rank) => {
      const row = element("tr", undefined, list);
      element("th", rank, row);
      [device, tokens.toLocaleString("en"), heads, memory].forEach((text) => element("td", text, row));
    });
  }

  inputs.forEach((input, i) => { input.value = today[i]; input.addEventListener("input", show); });
  show();
})();
