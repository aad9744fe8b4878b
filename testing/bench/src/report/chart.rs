//! Plots as hand-written SVG: lines over an ordered axis, or bars.

use super::html::escape;
use load::progress::quantity;
use std::fmt::Write as _;

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
    Bars,
    /// A bar for each label, one below the other, for labels that are words. For a single series,
    /// beginning at zero.
    Rows,
}

/// A series of a chart: a name, and a value for each label.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    /// Whether the series is quoted from a document, and drawn in a subdued style.
    pub quoted: bool,
    /// Value for each label of the chart, if there is one.
    pub values: Vec<Option<f64>>,
    /// Index of the colour; related series share one.
    pub colour: usize,
}

/// A chart of the report, which [`Chart::svg`] draws.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Name of the SVG file, without the extension.
    pub name: String,
    pub title: String,
    /// Title of the horizontal axis.
    pub axis: String,
    pub labels: Vec<String>,
    pub series: Vec<Series>,
    pub shape: Shape,
    /// Whether the vertical axis is logarithmic.
    pub log: bool,
    /// Horizontal line at a goal, and its name.
    pub goal: Option<(f64, String)>,
}

impl Chart {
    fn colour(&self, series: &Series) -> &'static str {
        COLOURS
            .get(series.colour % COLOURS.len())
            .copied()
            .unwrap_or("#000")
    }

    /// Returns the lowest and highest value of the vertical axis, and its tick marks.
    fn scale(&self) -> (f64, f64, Vec<f64>) {
        let values = self.series.iter().flat_map(|s| s.values.iter().flatten());
        let goal = self.goal.iter().map(|(v, _)| v);
        let all: Vec<f64> = values
            .chain(goal)
            .copied()
            .filter(|v| v.is_finite())
            .collect();
        let high = all.iter().copied().fold(0.0, f64::max);
        if self.log {
            let positive = all.iter().copied().filter(|v| *v > 0.0);
            let low = positive.fold(f64::INFINITY, f64::min);
            let (low, high) = if low.is_finite() {
                (low, high)
            } else {
                (1.0, 10.0)
            };
            let (from, to) = (low.log10().floor() as i32, high.log10().ceil() as i32);
            let to = to.max(from + 1);
            // Eight marks at most.
            let every = 1 + (to - from) / 8;
            let marks = (from..=to).step_by(every as usize).map(|e| 10f64.powi(e));
            let marks = marks.collect();
            return (10f64.powi(from), 10f64.powi(to), marks);
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
        let legend_lines = self.legend_lines();
        let top = TOP + 18.0 * legend_lines as f64 - 18.0;
        let bottom = top + PLOT;
        let height = bottom + 48.0;
        let y = |value: f64| {
            let share = if self.log {
                (value.max(low) / low).log10() / (high / low).log10()
            } else {
                (value - low) / (high - low)
            };
            bottom - PLOT * share.clamp(0.0, 1.0)
        };
        let inner = WIDTH - LEFT - RIGHT;
        let slot = inner / self.labels.len().max(1) as f64;
        let mut out = head(&self.title, height);
        self.legend(&mut out);
        for mark in marks {
            let at = y(mark);
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{x2}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e4e7eb\"/>\
                 <text x=\"{tx}\" y=\"{ty:.1}\" text-anchor=\"end\" fill=\"#5b6675\">{label}</text>",
                x2 = WIDTH - RIGHT,
                tx = LEFT - 8.0,
                ty = at + 4.0,
                label = short(mark)
            );
        }
        // Labels that would run into each other are left out, each second one first.
        let longest = self.labels.iter().map(|label| label.chars().count()).max();
        let wanted = CHARACTER * longest.unwrap_or(0) as f64 + 4.0;
        let every = (wanted / slot).ceil().max(1.0) as usize;
        for (i, label) in self.labels.iter().enumerate().step_by(every) {
            let _ = writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{label}</text>",
                x = LEFT + slot * (i as f64 + 0.5),
                y = bottom + 18.0,
                label = escape(label)
            );
        }
        let _ = writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" fill=\"#5b6675\">{axis}</text>\n\
             <line x1=\"{LEFT}\" x2=\"{x2}\" y1=\"{bottom}\" y2=\"{bottom}\" stroke=\"#8b95a1\"/>",
            x = LEFT + inner / 2.0,
            y = bottom + 38.0,
            axis = escape(&self.axis),
            x2 = WIDTH - RIGHT
        );
        match self.shape {
            Shape::Lines => self.lines(&mut out, slot, &y),
            Shape::Bars => self.bars(&mut out, slot, bottom, &y),
            Shape::Rows => {}
        }
        if let Some((value, name)) = &self.goal {
            let at = y(*value);
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{x2}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#1d2530\" stroke-dasharray=\"5 4\"/>\
                 <text x=\"{tx}\" y=\"{ty:.1}\" fill=\"#1d2530\">{name}</text>",
                x2 = WIDTH - RIGHT,
                tx = LEFT + 4.0,
                ty = at - 5.0,
                name = escape(name)
            );
        }
        out.push_str("</svg>\n");
        out
    }

    /// Returns a chart of rows, as high as needed.
    fn rows(&self) -> String {
        let (_, high, _) = self.scale();
        let height = ROWS_TOP + ROW * self.labels.len() as f64;
        let mut out = head(&self.title, height);
        let series = self.series.first();
        let values = series.iter().flat_map(|series| &series.values);
        let colour = series.map_or("#000", |series| self.colour(series));
        for (i, (label, value)) in self.labels.iter().zip(values).enumerate() {
            let top = ROWS_TOP + ROW * i as f64;
            let Some(value) = value.filter(|value| value.is_finite()) else {
                continue;
            };
            let _ = writeln!(
                out,
                "<text x=\"0\" y=\"{y:.1}\">{label}</text>\
                 <text x=\"{WIDTH}\" y=\"{y:.1}\" text-anchor=\"end\" fill=\"#5b6675\">{v}</text>\
                 <rect x=\"0\" y=\"{bar:.1}\" width=\"{w:.1}\" height=\"8\" fill=\"{colour}\"/>",
                y = top + 12.0,
                bar = top + 17.0,
                w = (WIDTH * (value / high).clamp(0.0, 1.0)).max(1.0),
                label = escape(label),
                v = quantity(value)
            );
        }
        out.push_str("</svg>\n");
        out
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

    fn legend_lines(&self) -> usize {
        self.legend_places().last().map_or(1, |(line, _)| line + 1)
    }

    fn legend(&self, out: &mut String) {
        for (series, (line, x)) in self.series.iter().zip(self.legend_places()) {
            let y = 38.0 + 18.0 * line as f64;
            let colour = self.colour(series);
            let mark = match (self.shape, series.quoted) {
                (Shape::Bars | Shape::Rows, false) => format!(
                    "<rect x=\"{x}\" y=\"{}\" width=\"14\" height=\"10\" fill=\"{colour}\"/>",
                    y - 9.0
                ),
                (Shape::Bars | Shape::Rows, true) => format!(
                    "<rect x=\"{}\" y=\"{}\" width=\"13\" height=\"9\" fill=\"{colour}\" fill-opacity=\".18\" stroke=\"{colour}\"/>",
                    x + 0.5,
                    y - 8.5
                ),
                (Shape::Lines, quoted) => format!(
                    "<line x1=\"{x}\" x2=\"{}\" y1=\"{ym}\" y2=\"{ym}\" stroke=\"{colour}\" stroke-width=\"2.4\"{}/>",
                    x + 16.0,
                    if quoted {
                        " stroke-dasharray=\"4 3\" stroke-opacity=\".75\""
                    } else {
                        ""
                    },
                    ym = y - 4.0
                ),
            };
            let _ = writeln!(
                out,
                "{mark}<text x=\"{}\" y=\"{y}\">{}</text>",
                x + 21.0,
                escape(&series.name)
            );
        }
    }

    fn lines(&self, out: &mut String, slot: f64, y: &dyn Fn(f64) -> f64) {
        for series in &self.series {
            let colour = self.colour(series);
            let points: Vec<(f64, f64, f64)> = series
                .values
                .iter()
                .enumerate()
                .filter_map(|(i, value)| value.map(|v| (LEFT + slot * (i as f64 + 0.5), y(v), v)))
                .collect();
            let path: Vec<String> = points
                .iter()
                .map(|(x, y, _)| format!("{x:.1},{y:.1}"))
                .collect();
            let _ = writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.4\" stroke-linejoin=\"round\"{}/>",
                path.join(" "),
                if series.quoted {
                    " stroke-dasharray=\"4 3\" stroke-opacity=\".75\""
                } else {
                    ""
                }
            );
            for (x, y, value) in points {
                let fill = if series.quoted { "#fff" } else { colour };
                let _ = writeln!(
                    out,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.4\" fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.4\">\
                     <title>{}: {}</title></circle>",
                    escape(&series.name),
                    quantity(value)
                );
            }
        }
    }

    fn bars(&self, out: &mut String, slot: f64, bottom: f64, y: &dyn Fn(f64) -> f64) {
        let count = self.series.len().max(1) as f64;
        let width = (slot * 0.78 / count).min(46.0);
        for (s, series) in self.series.iter().enumerate() {
            let colour = self.colour(series);
            let style = if series.quoted {
                format!("fill=\"{colour}\" fill-opacity=\".18\" stroke=\"{colour}\"")
            } else {
                format!("fill=\"{colour}\"")
            };
            for (i, value) in series.values.iter().enumerate() {
                let Some(value) = value else { continue };
                let x = LEFT + slot * (i as f64 + 0.5) + width * (s as f64 - count / 2.0);
                let top = y(*value);
                let _ = writeln!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" {style}><title>{name}: {v}</title></rect>",
                    w = (width - 2.0).max(1.0),
                    h = (bottom - top).max(0.5),
                    name = escape(&series.name),
                    v = quantity(*value)
                );
                if width >= 26.0 {
                    let _ = writeln!(
                        out,
                        "<text x=\"{tx:.1}\" y=\"{ty:.1}\" text-anchor=\"middle\" font-size=\"10\" fill=\"#5b6675\">{v}</text>",
                        tx = x + (width - 2.0) / 2.0,
                        ty = top - 4.0,
                        v = quantity(*value)
                    );
                }
            }
        }
    }
}

/// Returns the beginning of an SVG document.
fn head(title: &str, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         font-family=\"system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif\" \
         font-size=\"12\" fill=\"#1d2530\">\n\
         <title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"0\" y=\"16\" font-size=\"15\" font-weight=\"600\">{title}</text>\n",
        title = escape(title)
    )
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

    fn chart(log: bool, shape: Shape) -> Chart {
        let series = |name: &str, values: [Option<f64>; 3]| Series {
            name: name.into(),
            quoted: name.starts_with('<'),
            values: values.to_vec(),
            colour: 0,
        };
        Chart {
            name: "c".into(),
            title: "T & U".into(),
            axis: "depth".into(),
            labels: ["1", "2", "4"].map(String::from).to_vec(),
            series: vec![
                series("off", [Some(25_100.0), None, Some(0.0)]),
                series("<on>", [Some(1e6), Some(f64::NAN), None]),
            ],
            shape,
            log,
            goal: Some((1000.0, "goal".into())),
        }
    }

    #[test]
    fn charts_of_every_kind_stay_inside_frame() {
        for log in [false, true] {
            for shape in [Shape::Lines, Shape::Bars] {
                let svg = chart(log, shape).svg();
                assert!(svg.contains("T &amp; U") && svg.contains("&lt;on&gt;"));
                assert_eq!(svg.matches("<svg").count(), 1);
                assert!(!svg.contains("inf"), "{svg}");
            }
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
            let mut chart = chart(false, shape);
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
        let (low, high, marks) = chart(false, Shape::Bars).scale();
        assert_eq!((low, high), (0.0, 1e6));
        assert_eq!(marks.len(), 6);
        let (low, high, _) = chart(true, Shape::Bars).scale();
        assert_eq!((low, high), (1e3, 1e6));
        assert_eq!(step(0.3), 0.5);
        assert_eq!(short(0.1 + 0.2), "0.30");
    }
}
