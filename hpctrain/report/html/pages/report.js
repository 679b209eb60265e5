(function () {
  "use strict";
  var theme = {};

  function readTheme() {
    var style = getComputedStyle(document.documentElement);
    function value(name) { return style.getPropertyValue("--" + name).trim(); }
    theme = {"@ink": value("ink"), "@good": value("good"), "@fault": value("fault"),
             "@ramp": [[0, value("ramp-low")], [1, value("ramp-high")]]};
    for (var n = 1; n <= 8; n++) { theme["@" + n] = value("s" + n); }
    theme.soft = value("soft");
    theme.edge = value("edge");
    theme.card = value("card");
  }

  function coloured(value) {
    if (typeof value === "string") { return theme[value] || value; }
    if (Array.isArray(value)) { return value.map(coloured); }
    if (value && typeof value === "object") {
      var result = {};
      Object.keys(value).forEach(function (key) { result[key] = coloured(value[key]); });
      return result;
    }
    return value;
  }

  function axis(given) {
    return Object.assign({gridcolor: theme.edge, linecolor: theme.edge, zerolinecolor: theme.edge,
                          automargin: true}, given);
  }

  function draw(place) {
    var chart = JSON.parse(document.getElementById(place.id + "-data").textContent);
    var given = coloured(chart.layout);
    var layout = Object.assign({}, given, {
      height: chart.height, margin: {l: 54, r: 14, t: 12, b: 44},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: theme.soft},
      hoverlabel: {bgcolor: theme.card, bordercolor: theme.edge, font: {color: theme["@ink"]}},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: theme.edge, activecolor: theme.soft},
      legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom"},
      xaxis: axis(given.xaxis), yaxis: axis(given.yaxis)
    });
    var matrix = chart.traces.some(function (trace) { return trace.type === "heatmap"; });
    // The buttons are listed whole: versions of the library add some of their own, one that uploads the chart among them.
    Plotly.react(place, coloured(chart.traces), layout, {responsive: true, displaylogo: false, plotlyServerURL: "",
      displayModeBar: matrix ? false : "hover",
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]]});
  }

  function drawAll() {
    readTheme();
    document.querySelectorAll(".chart").forEach(draw);
  }

  drawAll();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
