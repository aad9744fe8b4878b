//! Plots as hand-written SVG: lines over an ordered axis, or bars.

use super::html::escape;
use load::progress::quantity;

/// Colours of a chart's series, distinguishable with colour blindness and in greyscale (after Okabe
/// and Ito).
const COLOURS: [&str; 7] = [
    "#1667b7", "#d55e00", "#009e73", "#8a4fbf", "#b8860b", "#56b4e9", "#5b6675",
];

const WIDTH: f64 = 500.0;
const TOP: f64 = 62.0;
const PLOT: f64 = 220.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 16.0;
/// Top margin in SVG units above the rows of a chart of form [`Shape::Rows`].
const ROWS_TOP: f64 = 30.0;
const ROW: f64 = 34.0;
/// Approximate width of a character in SVG units, from which the space for labels is computed.
const CHARACTER: f64 = 7.0;

/// Form of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Lines,
    /// Lines over a logarithmic vertical axis.
    LogLines,
    Bars,
    /// A bar for each label, one below the other, for labels that are words. For a single series,
    /// beginning at zero.
    Rows,
}

/// A series of a chart: a name, and a value for each label.
#[derive(Clone, Debug)]
struct Series {
    name: String,
    /// Whether the series is quoted from a document, and drawn in a subdued style.
    quoted: bool,
    /// Value for each label of the chart, if there is one.
    values: Vec<Option<f64>>,
    colour: &'static str,
}

/// A chart of the report, which [`Chart::svg`] draws.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Name of the SVG file, without the extension.
    pub name: String,
    title: String,
    /// Title of the horizontal axis.
    axis: String,
    labels: Vec<String>,
    series: Vec<Series>,
    shape: Shape,
    /// Horizontal line at a goal, and its name.
    pub goal: Option<(f64, &'static str)>,
}

impl Chart {
    /// Creates a chart without series.
    pub fn new(name: &str, title: &str, axis: &str, labels: Vec<String>, shape: Shape) -> Self {
        Self {
            name: name.into(),
            title: title.into(),
            axis: axis.into(),
            labels,
            series: Vec::new(),
            shape,
            goal: None,
        }
    }

    /// Adds a series. Related series share a number of a colour.
    pub fn add(&mut self, name: impl Into<String>, colour: usize, values: Vec<Option<f64>>) {
        let colour = COLOURS.get(colour % COLOURS.len()).copied();
        self.series.push(Series {
            name: name.into(),
            quoted: false,
            values,
            colour: colour.unwrap_or("#000"),
        });
    }

    /// Adds a series in a subdued style: one quoted from a document.
    pub fn quote(&mut self, name: impl Into<String>, colour: usize, values: Vec<Option<f64>>) {
        self.add(name, colour, values);
        if let Some(series) = self.series.last_mut() {
            series.quoted = true;
        }
    }

    /// Returns the lowest and highest value of the vertical axis, and its tick marks.
    fn scale(&self) -> (f64, f64, Vec<f64>) {
        let values = self.series.iter().flat_map(|s| s.values.iter().flatten());
        let goal = self.goal.iter().map(|(v, _)| v);
        let all = values.chain(goal).copied().filter(|v| v.is_finite());
        let all: Vec<f64> = all.collect();
        let high = all.iter().copied().fold(0.0, f64::max);
        if self.shape == Shape::LogLines {
            let positive = all.iter().copied().filter(|v| *v > 0.0);
            let low = positive.reduce(f64::min);
            let (low, high) = low.map_or((1.0, 10.0), |low| (low, high));
            let (from, to) = (low.log10().floor() as i32, high.log10().ceil() as i32);
            let to = to.max(from + 1);
            // Eight marks at most.
            let every = 1 + (to - from) / 8;
            let marks = (from..=to).step_by(every as usize).map(|e| 10f64.powi(e));
            return (10f64.powi(from), 10f64.powi(to), marks.collect());
        }
        let step = step(high.max(1e-9) / 5.0);
        let count = (high / step).ceil().max(1.0);
        let marks = (0..=count as u32).map(|i| f64::from(i) * step).collect();
        (0.0, count * step, marks)
    }

    /// Returns the chart as SVG.
    pub fn svg(&self) -> String {
        if self.shape == Shape::Rows {
            return self.rows();
        }
        let (low, high, marks) = self.scale();
        let places = self.legend_places();
        let legend_lines = places.last().map_or(0, |(line, _)| *line);
        let bottom = TOP + 18.0 * legend_lines as f64 + PLOT;
        let y = |value: f64| {
            let share = if self.shape == Shape::LogLines {
                (value.max(low) / low).log10() / (high / low).log10()
            } else {
                (value - low) / (high - low)
            };
            bottom - PLOT * share.clamp(0.0, 1.0)
        };
        let (inner, right) = (WIDTH - LEFT - RIGHT, WIDTH - RIGHT);
        let slot = inner / self.labels.len().max(1) as f64;
        let middle = |i: usize| LEFT + slot * (i as f64 + 0.5);
        let mut out = Svg::new(&self.title, bottom + 48.0);
        self.legend(&mut out, &places);
        for mark in marks {
            let at = y(mark);
            out.line(LEFT, right, at, "stroke=\"#e4e7eb\"");
            out.text(LEFT - 8.0, at + 4.0, &format!("{END} {SOFT}"), &short(mark));
        }
        // Labels that would run into each other are left out, each second one first.
        let longest = self.labels.iter().map(|label| label.chars().count()).max();
        let wanted = CHARACTER * longest.unwrap_or(0) as f64 + 4.0;
        let every = (wanted / slot).ceil().max(1.0) as usize;
        for (i, label) in self.labels.iter().enumerate().step_by(every) {
            out.text(middle(i), bottom + 18.0, MIDDLE, label);
        }
        let style = format!("{MIDDLE} {SOFT}");
        out.text(LEFT + inner / 2.0, bottom + 38.0, &style, &self.axis);
        out.line(LEFT, right, bottom, "stroke=\"#8b95a1\"");
        for (s, series) in self.series.iter().enumerate() {
            let values = series.values.iter().enumerate();
            let values = values.filter_map(|(i, value)| Some((middle(i), (*value)?)));
            if self.shape == Shape::Bars {
                let count = self.series.len().max(1) as f64;
                let width = (slot * 0.78 / count).min(46.0);
                let left = width * (s as f64 - count / 2.0);
                values.for_each(|(x, v)| series.bar(&mut out, x + left, width, (y(v), bottom), v));
            } else {
                series.line(
                    &mut out,
                    &values.map(|(x, v)| (x, y(v), v)).collect::<Vec<_>>(),
                );
            }
        }
        if let Some((value, name)) = self.goal {
            let at = y(value);
            let style = "stroke=\"#1d2530\" stroke-dasharray=\"5 4\"";
            out.line(LEFT, right, at, style);
            out.text(LEFT + 4.0, at - 5.0, "fill=\"#1d2530\"", name);
        }
        out.end()
    }

    /// Returns a chart of rows, as high as needed.
    fn rows(&self) -> String {
        let (_, high, _) = self.scale();
        let mut out = Svg::new(&self.title, ROWS_TOP + ROW * self.labels.len() as f64);
        if let Some(series) = self.series.first() {
            let rows = self.labels.iter().zip(&series.values).enumerate();
            for (i, (label, value)) in rows {
                let Some(value) = value.filter(|value| value.is_finite()) else {
                    continue;
                };
                let top = ROWS_TOP + ROW * i as f64;
                out.text(0.0, top + 12.0, "", label);
                out.text(
                    WIDTH,
                    top + 12.0,
                    &format!("{END} {SOFT}"),
                    &quantity(value),
                );
                let width = (WIDTH * (value / high).clamp(0.0, 1.0)).max(1.0);
                out.rect([0.0, top + 17.0, width, 8.0], &series.fill(), "");
            }
        }
        out.end()
    }

    /// Returns the row and horizontal position of each legend entry.
    fn legend_places(&self) -> Vec<(usize, f64)> {
        let (mut line, mut x) = (0, 0.0);
        let mut places = Vec::new();
        for series in &self.series {
            let width = 26.0 + 7.1 * series.name.chars().count() as f64;
            if x > 0.0 && x + width > WIDTH {
                line += 1;
                x = 0.0;
            }
            places.push((line, x));
            x += width + 10.0;
        }
        places
    }

    fn legend(&self, out: &mut Svg, places: &[(usize, f64)]) {
        for (series, &(line, x)) in self.series.iter().zip(places) {
            let y = 38.0 + 18.0 * line as f64;
            if self.shape == Shape::Bars {
                out.rect([x, y - 9.0, 14.0, 10.0], &series.fill(), "");
            } else {
                out.line(x, x + 16.0, y - 4.0, &series.stroke());
            }
            out.text(x + 21.0, y, "", &series.name);
        }
    }
}

impl Series {
    /// Returns the style of an area.
    fn fill(&self) -> String {
        let colour = self.colour;
        if self.quoted {
            return format!("fill=\"{colour}\" fill-opacity=\".18\" stroke=\"{colour}\"");
        }
        format!("fill=\"{colour}\"")
    }

    /// Returns the style of a line.
    fn stroke(&self) -> String {
        let dashes = " stroke-dasharray=\"4 3\" stroke-opacity=\".75\"";
        let dashes = if self.quoted { dashes } else { "" };
        format!("stroke=\"{}\" stroke-width=\"2.4\"{dashes}", self.colour)
    }

    /// Returns the element with the text that is shown when a pointer is over a value.
    fn tip(&self, value: f64) -> String {
        let text = format!("{}: {}", self.name, quantity(value));
        format!("<title>{}</title>", escape(&text))
    }

    /// Draws a line through points: two coordinates and the value.
    fn line(&self, out: &mut Svg, points: &[(f64, f64, f64)]) {
        let path = points.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}"));
        let path = path.collect::<Vec<_>>().join(" ");
        let stroke = self.stroke();
        let style = "fill=\"none\" stroke-linejoin=\"round\"";
        out.add(&format!("<polyline points=\"{path}\" {style} {stroke}/>\n"));
        for &(x, y, value) in points {
            let (colour, tip) = (self.colour, self.tip(value));
            let fill = if self.quoted { "#fff" } else { colour };
            out.add(&format!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.4\" fill=\"{fill}\" stroke=\"{colour}\" \
                 stroke-width=\"1.4\">{tip}</circle>\n"
            ));
        }
    }

    /// Draws the bar of a value.
    fn bar(&self, out: &mut Svg, x: f64, width: f64, (top, bottom): (f64, f64), value: f64) {
        let area = [x, top, (width - 2.0).max(1.0), (bottom - top).max(0.5)];
        out.rect(area, &self.fill(), &self.tip(value));
        if width >= 26.0 {
            let style = format!("{MIDDLE} font-size=\"10\" {SOFT}");
            out.text(x + (width - 2.0) / 2.0, top - 4.0, &style, &quantity(value));
        }
    }
}

const SOFT: &str = "fill=\"#5b6675\"";
const MIDDLE: &str = "text-anchor=\"middle\"";
const END: &str = "text-anchor=\"end\"";

/// An SVG document while it is drawn.
struct Svg(String);

impl Svg {
    fn new(title: &str, height: f64) -> Self {
        let title = escape(title);
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
             font-family=\"system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif\" \
             font-size=\"12\" fill=\"#1d2530\">\n\
             <title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
             <text x=\"0\" y=\"16\" font-size=\"15\" font-weight=\"600\">{title}</text>\n"
        ))
    }

    fn add(&mut self, element: &str) {
        self.0.push_str(element);
    }

    fn text(&mut self, x: f64, y: f64, style: &str, words: &str) {
        let words = escape(words);
        self.add(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{words}</text>\n"
        ));
    }

    /// Draws a horizontal line.
    fn line(&mut self, from: f64, to: f64, y: f64, style: &str) {
        let place = format!("x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"");
        self.add(&format!("<line {place} {style}/>\n"));
    }

    /// Draws a rectangle (x, y, width, height) with an element inside.
    fn rect(&mut self, [x, y, width, height]: [f64; 4], style: &str, inside: &str) {
        let size = format!("width=\"{width:.1}\" height=\"{height:.1}\"");
        let place = format!("x=\"{x:.1}\" y=\"{y:.1}\" {size}");
        self.add(&format!("<rect {place} {style}>{inside}</rect>\n"));
    }

    fn end(self) -> String {
        self.0 + "</svg>\n"
    }
}

/// Returns the smallest round number that is not below `least`: 1, 2 or 5 times a power of ten.
fn step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|s| s * power);
    steps
        .into_iter()
        .find(|s| *s >= least * 0.999)
        .unwrap_or(power * 10.0)
}

/// Formats the label of a tick mark.
fn short(value: f64) -> String {
    let text = match value {
        v if v >= 1e12 => format!("{v:.0e}"),
        v if v >= 1e9 => format!("{}G", v / 1e9),
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e3 => format!("{}k", v / 1e3),
        v => format!("{v}"),
    };
    // 0.30000000000000004 and its like.
    if text.len() > 8 {
        format!("{value:.2}")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(shape: Shape) -> Chart {
        let labels = ["1", "2", "4"].map(String::from).to_vec();
        let mut chart = Chart::new("c", "T & U", "depth", labels, shape);
        chart.add("off", 0, vec![Some(25_100.0), None, Some(0.0)]);
        chart.quote("<on>", 0, vec![Some(1e6), Some(f64::NAN), None]);
        chart.goal = Some((1000.0, "goal"));
        chart
    }

    #[test]
    fn charts_of_every_kind_stay_inside_frame() {
        for shape in [Shape::Lines, Shape::LogLines, Shape::Bars] {
            let svg = chart(shape).svg();
            assert!(svg.contains("T &amp; U") && svg.contains("&lt;on&gt;"));
            assert_eq!(svg.matches("<svg").count(), 1);
            assert!(!svg.contains("inf"), "{svg}");
        }
    }

    /// Returns the labels with their positions: the middle or the left end.
    fn places(svg: &str, labels: &[String]) -> Vec<(String, f64, f64)> {
        let number = |text: &str, name: &str| {
            let value = text.split(&format!(" {name}=\"")).nth(1).unwrap();
            value.split('"').next().unwrap().parse::<f64>().unwrap()
        };
        let texts = svg.split("<text").skip(1);
        let all = texts.filter_map(|text| {
            let (head, rest) = text.split_once('>')?;
            let label = rest.split('<').next()?.to_owned();
            labels
                .contains(&label)
                .then(|| (label, number(head, "x"), number(head, "y")))
        });
        all.collect()
    }

    #[test]
    fn chart_labels_do_not_overlap() {
        let long: Vec<String> = (0..12)
            .map(|i| format!("the worker's loop with mapped doorbells, case {i}"))
            .collect();
        for shape in [Shape::Rows, Shape::Bars, Shape::Lines] {
            let mut chart = chart(shape);
            chart.labels.clone_from(&long);
            chart.series.truncate(1);
            chart.series[0].values = vec![Some(300.0); long.len()];
            let svg = chart.svg();
            let found = places(&svg, &long);
            if shape == Shape::Rows {
                assert_eq!(found.len(), long.len(), "each has its row");
            }
            let mut last: Option<(f64, f64)> = None;
            for (label, x, y) in found {
                let width = CHARACTER * label.chars().count() as f64;
                if let Some((end, line)) = last.filter(|(_, line)| *line == y) {
                    assert!(x - width / 2.0 >= end, "{label} on {line}");
                }
                last = Some((x + width / 2.0, y));
            }
        }
    }

    #[test]
    fn chart_marks_are_round() {
        let (low, high, marks) = chart(Shape::Bars).scale();
        assert_eq!((low, high), (0.0, 1e6));
        assert_eq!(marks.len(), 6);
        let (low, high, _) = chart(Shape::LogLines).scale();
        assert_eq!((low, high), (1e3, 1e6));
        assert_eq!(step(0.3), 0.5);
        assert_eq!(short(0.1 + 0.2), "0.30");
    }
}
