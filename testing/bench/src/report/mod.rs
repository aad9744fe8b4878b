//! Reports from `results.json`: tables on the terminal, and a page with tables and plots.

mod chart;
pub mod documents;
mod html;
mod sections;
mod summary;
mod table;

use super::results::{self, Figures, LeftOut, Results};
use anyhow::{Context, Result};
use output::outln;
use std::path::{Path, PathBuf};

/// Writes the report: reads figures of additional programs, prints the tables (optionally of a
/// single suite), and writes `report.html` and an SVG file for each plot.
pub fn write(output: &Path, add: &[PathBuf], only: Option<&str>) -> Result<()> {
    let path = output.join(results::FILE);
    let mut results = Results::read(&path)?;
    for file in add {
        if file.exists() {
            results.merge(Results::read(file)?);
        } else {
            // The program that was to write it names the file after its suite.
            let stem = file.file_stem().unwrap_or_default().to_string_lossy();
            let why = format!("{} was not written: its program failed", file.display());
            let left = LeftOut {
                suite: stem.clone().into_owned(),
                what: "the suite".into(),
                why,
            };
            results.replace(&stem, Figures::default(), vec![left]);
        }
    }
    std::fs::create_dir_all(output).with_context(|| format!("{}", output.display()))?;
    if !add.is_empty() {
        results.write(&path)?;
    }
    let sections = sections::all(&results);
    for section in &sections {
        if only.is_none_or(|suite| suite == section.id) {
            outln!("\n{}\n", section.title);
            for table in &section.tables {
                outln!("{}", table.text());
            }
        }
        for chart in &section.charts {
            let file = output.join(format!("{}.svg", chart.name));
            std::fs::write(&file, chart.svg()).with_context(|| format!("{}", file.display()))?;
        }
    }
    let left = results.about.left_out.iter();
    for left in left.filter(|l| only.is_none_or(|suite| suite == l.suite)) {
        outln!("left out of {}: {}: {}", left.suite, left.what, left.why);
    }
    let page = output.join("report.html");
    std::fs::write(&page, html::page(&results, &sections))
        .with_context(|| format!("{}", page.display()))?;
    outln!("written: {}, {}", path.display(), page.display());
    Ok(())
}
