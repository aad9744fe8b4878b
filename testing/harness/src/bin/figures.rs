//! The chart and the table of docs/figures.md, made of the results of suite `guest`.
//!
//! Usage: `figures GUEST.json DOCS [--timed]`. Draws DOCS/figures.svg, and writes the table into
//! DOCS/figures.md between its two marks, with the machine that this runs on and the day. With
//! `--timed` reads per second are shown, too: only from a machine that did nothing else meanwhile.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// Compared cases: the case, its name for readers, and its class in the drawing.
const CASES: [(&str, &str, &str); 4] = [
    ("vnvme shadow on", "vnvme, shadow doorbells", "a"),
    ("qemu dbcs on", "QEMU's nvme, shadow doorbells", "b"),
    ("vnvme shadow off", "vnvme, without", "c"),
    ("qemu dbcs off", "QEMU's nvme, without", "d"),
];
const DEPTHS: [u64; 5] = [1, 2, 4, 8, 32];

const BEGIN: &str = "<!-- measured: begin -->";
const END: &str = "<!-- measured: end -->";

fn main() {
    if let Err(error) = run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        eprintln!("figures: {error:#}");
        std::process::exit(1);
    }
}

fn run(args: &[String]) -> Result<()> {
    let (input, docs, timed) = match args {
        [input, docs] => (Path::new(input), Path::new(docs), false),
        [input, docs, timed] if timed == "--timed" => (Path::new(input), Path::new(docs), true),
        _ => bail!("usage: figures GUEST.json DOCS [--timed]"),
    };
    let when = output("date", &["-u", "+%Y-%m-%d"])?;
    let text = fs::read_to_string(input).with_context(|| format!("{}", input.display()))?;
    let objects: Vec<Value> = serde_json::from_str(&text)?;
    let figures = Figures::of(&objects)?;
    let path = docs.join("figures.svg");
    fs::write(&path, figures.chart(timed)).with_context(|| format!("{}", path.display()))?;
    let command = objects
        .iter()
        .find_map(|o| o.pointer("/commands/0")?.as_str());
    let command = command.context("no command is recorded")?;
    replace(
        &docs.join("figures.md"),
        &figures.table(command, &when, timed)?,
    )
}

fn output(program: &str, args: &[&str]) -> Result<String> {
    let out = Command::new(program).args(args).output()?;
    Ok(String::from_utf8(out.stdout)?.trim().to_owned())
}

/// Puts `text` between the marks of a file.
fn replace(path: &Path, text: &str) -> Result<()> {
    let old = fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let (before, rest) = old.split_once(BEGIN).context("figures.md has no mark")?;
    let (_, after) = rest
        .split_once(END)
        .context("figures.md has no second mark")?;
    fs::write(path, format!("{before}{BEGIN}\n{text}{END}{after}"))?;
    Ok(())
}

/// By case and depth: I/Os a second, and doorbell registers written for each of them.
struct Figures {
    iops: Vec<[f64; 5]>,
    mmio: Vec<[f64; 5]>,
}

impl Figures {
    fn of(objects: &[Value]) -> Result<Self> {
        let value = |case: &str, depth: u64, metric: &str| {
            let found = objects
                .iter()
                .find(|o| o["case"] == case && o["depth"] == depth && o["metric"] == metric);
            let value = found.and_then(|o| o["value"].as_f64());
            value.with_context(|| format!("{metric} of {case} at depth {depth} is missing"))
        };
        let rows = |metric: &str| -> Result<Vec<[f64; 5]>> {
            let row = |case: &str| -> Result<[f64; 5]> {
                let mut row = [0.0; 5];
                for (to, depth) in row.iter_mut().zip(DEPTHS) {
                    *to = value(case, depth, metric)?;
                }
                Ok(row)
            };
            CASES.iter().map(|(case, ..)| row(case)).collect()
        };
        let figures = Self {
            iops: rows("iops")?,
            mmio: rows("mmio_per_io")?,
        };
        let all = figures.iops.iter().chain(&figures.mmio).flatten();
        ensure!(all.clone().all(|v| v.is_finite()), "a figure is no number");
        Ok(figures)
    }

    fn table(&self, command: &str, when: &str, timed: bool) -> Result<String> {
        let cpus = fs::read_to_string("/proc/cpuinfo")?;
        let model = cpus
            .lines()
            .find_map(|line| line.strip_prefix("model name"));
        let model = model.map_or("?", |text| text.trim_start_matches([' ', '\t', ':']));
        let count = cpus.lines().filter(|l| l.starts_with("processor")).count();
        let kernel = output("uname", &["-r"])?;
        let kernel = kernel.split('-').next().unwrap_or(&kernel);
        let mut text = format!(
            "Measured on {when}: `{command}`, on {model} ({count} CPUs, a virtual machine), Linux {kernel}.\n\n"
        );
        if timed {
            text += "| 4 KiB random reads a second, at depth | 1 | 2 | 4 | 8 | 32 |\n|---|---|---|---|---|---|\n";
            for ((_, name, _), row) in CASES.iter().zip(&self.iops) {
                write!(text, "| {name} |")?;
                row.iter().try_for_each(|v| write!(text, " {v:.0} |"))?;
                text.push('\n');
            }
            text.push('\n');
        }
        text += "| doorbell registers written for each I/O, at depth | 1 | 2 | 4 | 8 | 32 |\n|---|---|---|---|---|---|\n";
        for ((_, name, _), row) in CASES.iter().zip(&self.mmio) {
            write!(text, "| {name} |")?;
            row.iter().try_for_each(|v| write!(text, " {v:.4} |"))?;
            text.push('\n');
        }
        Ok(text)
    }

    fn chart(&self, timed: bool) -> String {
        let mut svg = String::from(HEAD);
        let exits = |value: f64| match value {
            value if value < 0.005 => "0".into(),
            value => format!("{value:.2}"),
        };
        let (left, step) = if timed { (440.0, 80.0) } else { (20.0, 164.0) };
        let rows = &self.mmio;
        let title = "Doorbell registers written for each I/O: each is an exit of the guest";
        let title = if timed {
            "Doorbell registers written for each I/O"
        } else {
            title
        };
        panel(&mut svg, (left, step), title, rows, exits);
        if timed {
            let title = "4 KiB random reads a second, in the guest";
            panel(&mut svg, (20.0, step), title, &self.iops, thousands);
        }
        for (i, (_, name, class)) in CASES.iter().enumerate() {
            let (x, y) = (20 + 420 * (i % 2), 300 + 24 * (i / 2));
            let _ = write!(
                svg,
                "  <rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" rx=\"2\"/>\n  \
                 <text x=\"{}\" y=\"{}\">{name}</text>\n",
                x + 22,
                y + 12
            );
        }
        svg + "</svg>\n"
    }
}

fn thousands(value: f64) -> String {
    format!("{:.1}k", value / 1000.0)
}

/// Groups of bars, one for each depth.
fn panel(
    svg: &mut String,
    (left, step): (f64, f64),
    title: &str,
    rows: &[[f64; 5]],
    label: impl Fn(f64) -> String,
) {
    let (bottom, height, bar) = (250.0, 180.0, step * 0.21);
    let most = rows
        .iter()
        .flatten()
        .copied()
        .fold(f64::MIN_POSITIVE, f64::max);
    let _ = writeln!(
        svg,
        "  <text class=\"head\" x=\"{left}\" y=\"32\">{title}</text>"
    );
    let _ = writeln!(
        svg,
        "  <path class=\"axis\" d=\"M{left} {bottom} h{}\"/>",
        step * 5.0
    );
    for (at, depth) in DEPTHS.iter().enumerate() {
        let from = left + 6.0 + step * at as f64;
        let _ = writeln!(
            svg,
            "  <text class=\"quiet mid\" x=\"{}\" y=\"{}\">depth {depth}</text>",
            from + bar * 2.0,
            bottom + 18.0
        );
        for (i, (row, (_, _, class))) in rows.iter().zip(CASES).enumerate() {
            let value = row.get(at).copied().unwrap_or(0.0);
            let tall = (value / most * height).max(1.0);
            let x = from + bar * i as f64;
            let _ = write!(
                svg,
                "  <rect class=\"{class}\" x=\"{x}\" y=\"{:.1}\" width=\"{}\" height=\"{tall:.1}\"/>\n  \
                 <text class=\"value\" transform=\"translate({} {:.1}) rotate(-90)\">{}</text>\n",
                bottom - tall,
                bar - 2.0,
                x + bar / 2.0 + 2.5,
                bottom - tall - 4.0,
                label(value)
            );
        }
    }
}

const HEAD: &str = r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 356" width="860" height="356" role="img" aria-labelledby="title desc" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif" font-size="14">
  <title id="title">vnvme beside QEMU's own NVMe controller, in the same guest</title>
  <desc id="desc">Bars for queue depths 1, 2, 4, 8 and 32; the numbers are in figures.md.</desc>
  <style>
    .card { fill: #ffffff; stroke: #c9d1d9; }
    .axis { stroke: #8b98a5; stroke-width: 1; fill: none; }
    .a { fill: #1667b7; } .b { fill: #d55e00; } .c { fill: #8fbce6; } .d { fill: #f3b27a; }
    text { fill: #1f2933; }
    .head { font-weight: 600; }
    .quiet { fill: #52606d; font-size: 12px; }
    .value { fill: #52606d; font-size: 10px; }
    .mid { text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; stroke: #3d444d; }
      .axis { stroke: #8b949e; }
      .a { fill: #58a6ff; } .b { fill: #f0883e; } .c { fill: #27507f; } .d { fill: #8a4b1d; }
      text { fill: #e6edf3; } .quiet, .value { fill: #a5b0bb; }
    }
  </style>
  <rect class="card" x="1" y="1" width="858" height="354" rx="10"/>
"##;
