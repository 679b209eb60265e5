(function () {
  "use strict";
  var COLOURS = 8, theme = {}, root = document.documentElement;

  function readTheme() {
    var style = getComputedStyle(root);
    function value(name) { return style.getPropertyValue("--" + name).trim(); }
    ["ink", "soft", "faint", "edge", "card", "good", "fault"].forEach(function (name) { theme[name] = value(name); });
    theme.ramp = [value("ramp-low"), value("ramp-middle"), value("ramp-high")];
    theme.series = [];
    for (var n = 1; n <= COLOURS; n++) { theme.series.push(value("s" + n)); }
    theme.font = getComputedStyle(document.body).fontFamily;
  }

  // A colour beyond the palette is the quiet one behind the others, or the palette again.
  function colour(curve) {
    return curve.form === "faint" && curve.colour >= COLOURS ? theme.faint : theme.series[curve.colour % COLOURS];
  }

  var PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]];

  function number(value, unit) {
    var size = Math.abs(value), prefix = [1, ""];
    if (unit === "%") { return parseFloat((100 * value).toPrecision(4)) + " %"; }
    if (size === 0) { return "0"; }
    if (!unit && size < 1e6 && Number.isInteger(value)) { return value.toLocaleString("en-US"); }
    if (unit || size >= 1e6) {
      prefix = PREFIXES.find(function (entry) { return size >= entry[0] * 0.99999; }) || PREFIXES[PREFIXES.length - 1];
      if (!unit && prefix[0] < 1) { prefix = [1, ""]; }
    } else if (size < 1e-3) {
      return parseFloat(value.toPrecision(3)).toExponential();
    }
    var digits = parseFloat((value / prefix[0]).toPrecision(4));
    return digits.toLocaleString("en-US", {maximumSignificantDigits: 4}) + (prefix[1] + unit && " ") + prefix[1] + unit;
  }

  function text(value) {
    return String(value).replace(/[&<>"]/g, function (sign) {
      return {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[sign];
    });
  }

  function dot(ink) {
    return '<span style="display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px;background:' +
      ink + '"></span>';
  }

  function common(extra) {
    return Object.assign({
      animation: false, textStyle: {fontFamily: theme.font, fontSize: 12, color: theme.soft},
      grid: {left: 6, right: 18, top: 40, bottom: 30, outerBoundsMode: "same", outerBoundsContain: "axisLabel"}
    }, extra);
  }

  function tooltip(extra) {
    return Object.assign({confine: true, backgroundColor: theme.card, borderColor: theme.edge, padding: [6, 10],
      textStyle: {color: theme.ink, fontSize: 12, fontFamily: theme.font}}, extra);
  }

  function legend(names, narrow) {
    return {type: "scroll", top: 2, left: 0, right: narrow ? 0 : 110, data: names, itemWidth: 18, itemHeight: 9, itemGap: 14,
      inactiveColor: theme.edge, pageIconColor: theme.soft, pageIconInactiveColor: theme.edge, pageIconSize: 10,
      textStyle: {color: theme.soft, fontSize: 12}, pageTextStyle: {color: theme.soft}};
  }

  function zoomTools() {
    return {right: 0, top: -8, itemSize: 13, itemGap: 8, iconStyle: {borderColor: theme.faint},
      emphasis: {iconStyle: {borderColor: theme.ink, textFill: theme.ink}},
      feature: {dataZoom: {filterMode: "none", title: {zoom: "zoom", back: "back"}}, restore: {title: "whole"}}};
  }

  function axis(given, extra) {
    return Object.assign({
      type: given.log ? "log" : "value", name: given.title, scale: !given.zero,
      nameTextStyle: {color: theme.soft}, axisLine: {show: false}, axisTick: {show: false},
      splitLine: {lineStyle: {color: theme.edge}}, minorSplitLine: {show: false},
      axisLabel: {color: theme.soft, hideOverlap: true, formatter: function (value) { return number(value, given.unit); }}
    }, extra);
  }

  function horizontal(given) {
    return axis(given, {nameLocation: "middle", nameGap: 26, splitLine: {show: false}, scale: true, min: "dataMin",
      max: "dataMax", axisLine: {show: true, lineStyle: {color: theme.edge}}, axisTick: {show: true,
      lineStyle: {color: theme.edge}}, axisLabel: {color: theme.soft, hideOverlap: true, showMinLabel: null,
      formatter: function (value) { return number(parseFloat(value.toPrecision(6)), given.unit); }}});
  }

  function band(curve, places, ink) {
    var data = places.map(function (x, index) { return [x, curve.low[index], curve.high[index]]; });
    return {type: "custom", name: curve.name, silent: true, clip: true, z: 1, data: data, encode: {x: 0, y: [1, 2]},
      itemStyle: {color: ink}, tooltip: {show: false},
      renderItem: function (params, api) {
        if (params.dataIndex !== 0) { return null; }
        var high = data.map(function (point) { return api.coord([point[0], point[2]]); });
        var low = data.map(function (point) { return api.coord([point[0], point[1]]); });
        return {type: "polygon", shape: {points: high.concat(low.reverse())}, style: {fill: ink, opacity: 0.18}};
      }};
  }

  function lines(chart, which, narrow) {
    var series = [], DASH = {line: "solid", faint: "solid", dashed: [6, 4], points: "dotted"};
    chart.curves.forEach(function (curve) {
      var ink = colour(curve), places = curve.x[which], faint = curve.form === "faint", points = curve.form === "points";
      var alone = places.length === 1;
      if (curve.low) { series.push(band(curve, places, ink)); }
      series.push({type: "line", name: curve.name, data: places.map(function (x, index) { return [x, curve.y[index]]; }),
        color: ink, z: faint ? 1 : 3, showSymbol: points || alone, symbol: points ? "diamond" : "circle",
        symbolSize: points ? 9 : 7, silent: faint,
        lineStyle: {width: faint ? 1 : 2, opacity: faint ? 0.45 : 1, type: DASH[curve.form]}});
    });
    if (series.length && chart.marks.length) {
      series[series.length - 1].markLine = {silent: true, symbol: "none", animation: false, label: {show: false},
        data: chart.marks.map(function (mark) {
          var fault = mark.kind === "fault";
          return {xAxis: mark.x[which], lineStyle: {color: fault ? theme.fault : theme.good, width: 1.5,
            type: fault ? "dotted" : "dashed"}};
        })};
    }
    var shown = chart.curves.filter(function (curve) { return curve.form !== "faint"; });
    var names = shown.map(function (curve) { return curve.name; });
    return common({
      xAxis: horizontal(chart.x[which]), yAxis: axis(chart.y, {name: ""}), series: series, toolbox: narrow ? undefined : zoomTools(),
      legend: legend(shown.length > 1 || chart.curves.length > 1 ? names : [], narrow),
      grid: {left: 6, right: 18, top: shown.length > 1 || chart.curves.length > 1 ? 40 : 22, bottom: 30, outerBoundsMode: "same",
        outerBoundsContain: "axisLabel"},
      tooltip: tooltip({trigger: "axis", axisPointer: {lineStyle: {color: theme.faint}}, formatter: function (items) {
        var seen = items.filter(function (item) { return item.seriesType === "line" && item.value[1] !== null; });
        if (!seen.length) { return ""; }
        var head = chart.x[which].title + " " + number(seen[0].value[0], chart.x[which].unit);
        return text(head) + seen.map(function (item) {
          return "<br>" + dot(item.color) + text(item.seriesName) + " &nbsp;<b>" +
            text(number(item.value[1], chart.y.unit)) + "</b>";
        }).join("");
      }})
    });
  }

  function heat(chart) {
    var data = [], low = Infinity, high = -Infinity;
    chart.cells.forEach(function (row, y) {
      row.forEach(function (value, x) {
        if (value === null) { return; }
        data.push([x, y, value]);
        low = Math.min(low, value);
        high = Math.max(high, value);
      });
    });
    var gap = chart.rows.length > 40 || chart.columns.length > 60 ? 0 : 1;
    function category(names, title, extra) {
      return Object.assign({type: "category", data: names, name: title, axisLine: {show: false}, axisTick: {show: false},
        nameTextStyle: {color: theme.soft}, axisLabel: {color: theme.soft, hideOverlap: true, width: 110,
        overflow: "truncate"}}, extra);
    }
    return common({
      xAxis: category(chart.columns, chart.x.title, {nameLocation: "middle", nameGap: 26}),
      yAxis: category(chart.rows, chart.y.title, {inverse: true, nameLocation: "start", nameGap: 8,
        axisLabel: {color: theme.soft, width: 110, overflow: "truncate", interval: Math.ceil(chart.rows.length / 26) - 1}}),
      grid: {left: 6, right: 12, top: 58, bottom: 30, outerBoundsMode: "same", outerBoundsContain: "axisLabel"},
      visualMap: {type: "continuous", min: low, max: high === low ? low + Math.abs(low || 1) * 1e-6 : high, orient: "horizontal",
        right: 0, top: 0, itemWidth: 10, itemHeight: 110, inRange: {color: theme.ramp}, precision: 3,
        text: [number(high, chart.unit), number(low, chart.unit)], textStyle: {color: theme.soft}},
      tooltip: tooltip({trigger: "item", formatter: function (item) {
        return text(chart.y.title + " " + chart.rows[item.value[1]]) + "<br>" +
          text(chart.x.title + " " + chart.columns[item.value[0]]) + "<br><b>" + text(number(item.value[2], chart.unit)) + "</b>";
      }}),
      series: [{type: "heatmap", data: data, progressive: 0, itemStyle: {borderColor: theme.card, borderWidth: gap},
        label: {show: chart.numbers, fontSize: 11, formatter: function (item) {
          return String(parseFloat(item.value[2].toPrecision(3)));
        }}, emphasis: {itemStyle: {borderColor: theme.ink, borderWidth: 1}}}]
    });
  }

  function spans(chart, which, narrow) {
    var series = chart.kinds.map(function (kind, index) {
      var ink = theme.series[index % COLOURS];
      return {type: "custom", name: kind, clip: true, color: ink, itemStyle: {color: ink}, encode: {x: [1, 2], y: 0},
        z: 2 + chart.kinds.length - index,  // an operation lies within one of a later kind
        data: chart.bars.filter(function (bar) { return bar[1] === index; }).map(function (bar) {
          return {value: [bar[0], bar[2], bar[3]], name: bar[4]};
        }),
        renderItem: function (params, api) {
          var start = api.coord([api.value(1), api.value(0)]), end = api.coord([api.value(2), api.value(0)]);
          var height = 0.72 * api.size([0, 1])[1];
          return {type: "rect", shape: {x: start[0], y: start[1] - height / 2, width: Math.max(0.5, end[0] - start[0]),
            height: height}, style: {fill: ink}};
        }};
    }).filter(function (entry) { return entry.data.length; });
    return common({
      xAxis: axis({title: "from the start of the step", unit: "s", zero: true}, {nameLocation: "middle", nameGap: 26,
        max: "dataMax"}),
      yAxis: {type: "category", data: chart.rows, inverse: true, axisLine: {show: false}, axisTick: {show: false},
        axisLabel: {color: theme.soft, hideOverlap: true}},
      legend: legend(series.map(function (entry) { return entry.name; }), narrow), series: series,
      toolbox: narrow ? undefined : zoomTools(),
      tooltip: tooltip({trigger: "item", formatter: function (item) {
        return dot(item.color) + text(item.name) + "<br>" + text(chart.rows[item.value[0]]) + ", <b>" +
          number(item.value[2] - item.value[1], "s") + "</b> from " + number(item.value[1], "s");
      }})
    });
  }

  function isLarge(chart) {
    if (chart.kind === "heat") { return chart.rows.length * chart.columns.length > 2000; }
    return chart.kind === "spans" && chart.bars.length > 2000;
  }

  function draw(place) {
    var chart = place.chart, old = echarts.getInstanceByDom(place);
    if (old) { old.dispose(); }
    // Drawn as SVG, text stays sharp in print; thousands of rectangles are drawn faster on a canvas.
    var view = echarts.init(place, null, {renderer: isLarge(chart) ? "canvas" : "svg"});
    view.setOption({lines: lines, heat: heat, spans: spans}[chart.kind](chart, place.which, place.clientWidth < 480));
  }

  function drawAll() {
    readTheme();
    document.querySelectorAll(".chart").forEach(draw);
  }

  // Arrow keys move the pointer from value to value.
  function step(place, event) {
    var moves = {ArrowRight: 1, ArrowLeft: -1, PageDown: 25, PageUp: -25, Home: -Infinity, End: Infinity};
    var view = echarts.getInstanceByDom(place), series = view.getOption().series;
    var which = -1;  // the longest series; bands have no text
    series.forEach(function (entry, index) {
      var shown = entry.type !== "custom" || place.chart.kind === "spans";
      if (shown && (which < 0 || entry.data.length >= series[which].data.length)) { which = index; }
    });
    if (event.key === "Escape") { view.dispatchAction({type: "hideTip"}); }
    if (!(event.key in moves) || which < 0) { return; }
    event.preventDefault();
    var last = series[which].data.length - 1;
    place.at = Math.max(0, Math.min(last, (place.at === undefined ? -1 : place.at) + moves[event.key]));
    view.dispatchAction({type: "showTip", seriesIndex: which, dataIndex: place.at});
  }

  var MOST_ROWS = 200;

  function table(chart, which) {
    var head, rows;
    if (chart.kind === "lines") {
      head = ["", chart.x[which].title, "value"];
      rows = [].concat.apply([], chart.curves.map(function (curve) {
        return curve.y.map(function (value, index) {
          return [curve.name, number(curve.x[which][index], chart.x[which].unit), value === null ? "–" : number(value, chart.y.unit)];
        });
      }));
    } else if (chart.kind === "heat") {
      head = [chart.y.title + " / " + chart.x.title].concat(chart.columns);
      rows = chart.cells.map(function (row, index) {
        return [chart.rows[index]].concat(row.map(function (value) { return value === null ? "–" : number(value, chart.unit); }));
      });
    } else {
      head = ["row", "what", "from", "takes"];
      rows = chart.bars.map(function (bar) {
        return [chart.rows[bar[0]], bar[4], number(bar[2], "s"), number(bar[3] - bar[2], "s")];
      });
    }
    var stride = Math.ceil(rows.length / MOST_ROWS) || 1, made = document.createElement("table");
    function line(cells, tag) {
      var row = made.insertRow();
      cells.forEach(function (cell, index) {
        var item = document.createElement(tag);
        item.textContent = cell;
        if (index) { item.className = "num"; }
        row.appendChild(item);
      });
    }
    line(head, "th");
    rows.filter(function (_, index) { return index % stride === 0; }).forEach(function (row) { line(row, "td"); });
    if (stride > 1) { made.createCaption().textContent = "1 of " + stride + " rows"; }
    return made;
  }

  function choice(place) {
    var label = document.createElement("label"), select = document.createElement("select");
    label.className = "over";
    label.textContent = "over ";
    place.chart.x.forEach(function (given, index) { select.add(new Option(given.title, index)); });
    select.addEventListener("change", function () { place.which = Number(select.value); draw(place); });
    label.appendChild(select);
    place.parentNode.querySelector("h3").appendChild(label);
  }

  readTheme();
  document.querySelectorAll(".chart").forEach(function (place) {
    var figure = place.parentNode, values = figure.querySelector("details");
    place.chart = JSON.parse(document.getElementById(place.id + "-data").textContent);
    place.which = 0;
    if (place.chart.kind === "lines" && place.chart.x.length > 1) { choice(place); }
    draw(place);
    place.addEventListener("keydown", step.bind(null, place));
    values.addEventListener("toggle", function () {
      var holder = values.querySelector("div");
      holder.textContent = "";
      if (values.open) { holder.appendChild(table(place.chart, place.which)); }
    });
    new ResizeObserver(function () { echarts.getInstanceByDom(place).resize(); }).observe(place);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  window.addEventListener("beforeprint", function () {
    root.classList.add("print");
    drawAll();
    document.querySelectorAll(".chart").forEach(function (place) {
      echarts.getInstanceByDom(place).resize({width: Math.min(place.clientWidth, 660)});
    });
  });
  window.addEventListener("afterprint", function () { root.classList.remove("print"); drawAll(); });
})();
