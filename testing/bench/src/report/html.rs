//! The HTML report: a single file that loads nothing else and is small enough to be mailed.

use super::sections::Section;
use super::summary;
use crate::results::Results;

const STYLE: &str = "
:root { --ink: #1d2530; --soft: #5b6675; --line: #dfe3e8; --quiet: #f6f7f9; --accent: #1667b7; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.5 system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 22px; margin: 56px 0 6px; padding-top: 20px; border-top: 1px solid var(--line); }
p { margin: 6px 0 14px; max-width: 76ch; }
.machine, .note { color: var(--soft); font-size: 14px; }
nav { margin: 18px 0 0; font-size: 14px; display: flex; flex-wrap: wrap; gap: 6px 16px; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
figure { margin: 20px 0; } figure svg { width: 100%; height: auto; display: block; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(430px, 1fr)); gap: 0 28px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 18px 0 6px; font-size: 14px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 6px; font-size: 15px; }
th, td { padding: 4px 14px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
tbody th, thead th:first-child { text-align: left; font-weight: 500; padding-left: 0; }
thead th { color: var(--soft); font-weight: 500; border-bottom: 1px solid #b9c1cb; }
tr.quoted th, tr.quoted td { color: var(--soft); font-style: italic; }
ul.short { padding-left: 20px; max-width: 76ch; }
ul.left { font-size: 14px; color: var(--soft); padding-left: 20px; }
code { font: 13px ui-monospace, 'Liberation Mono', monospace; background: var(--quiet); padding: 1px 5px; border-radius: 4px; }
@media print { main { padding: 0; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
";

/// Escapes text for HTML or SVG.
pub fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// Returns a list of items; nothing without items.
fn list(class: &str, items: impl Iterator<Item = String>) -> String {
    let items: String = items
        .map(|item| format!("<li>{}</li>\n", escape(&item)))
        .collect();
    if items.is_empty() {
        return items;
    }
    format!("<ul class=\"{class}\">\n{items}</ul>\n")
}

/// Returns the whole HTML page.
pub fn page(results: &Results, sections: &[Section]) -> String {
    let (about, machine) = (&results.about, &results.about.machine);
    let kind = if machine.hypervisor {
        " of a virtual machine"
    } else {
        ""
    };
    let mut facts = vec![
        machine.cpu.clone(),
        format!("{} CPUs{kind}", machine.cpus),
        format!("{} GiB", machine.memory_mib.div_ceil(1024)),
        format!("Linux {}", machine.kernel),
        format!("vnvme {}", machine.version),
        format!("a look at the clock {:.0} ns", machine.clock_ns),
        format!("CPU taken by the host {:.1}%", 100.0 * machine.stolen),
        date(machine.time),
    ];
    facts.retain(|fact| !fact.is_empty());
    let links = sections.iter().map(|section| {
        let (id, title) = (section.id, escape(section.title));
        format!("<a href=\"#{id}\">{title}</a>")
    });
    let mut body = format!(
        "<h1>vnvme, measured</h1>\n<p class=\"machine\">{facts}</p>\n{short}<p>{runs}Compare figures of one \
         table with each other; another machine, or another hour, gives others. Rows in <i>italics</i> are what \
         the documents state that this project follows, on their machines.</p>\n<nav>{links}</nav>\n",
        facts = escape(&facts.join(" \u{b7} ")),
        short = list("short", summary::sentences(results).into_iter()),
        runs = escape(summary::runs(results)),
        links = links.collect::<String>(),
    );
    for section in sections {
        let charts = section.charts.iter();
        let charts = charts.map(|chart| format!("<figure>{}</figure>\n", chart.svg()));
        let tables = section.tables.iter();
        let tables = tables.map(|table| format!("<div class=\"scroll\">{}</div>\n", table.html()));
        body += &format!(
            "<h2 id=\"{id}\">{title}</h2>\n<p>{intro}</p>\n<div class=\"pair\">\n{charts}</div>\n{tables}",
            id = section.id,
            title = escape(section.title),
            intro = escape(section.intro),
            charts = charts.collect::<String>(),
            tables = tables.collect::<String>(),
        );
    }
    body += "<h2 id=\"how\">How it was measured</h2>\n";
    for command in &about.commands {
        body += &format!("<p><code>{}</code></p>\n", escape(command));
    }
    let left = about.left_out.iter();
    let left = left.map(|left| format!("{}: {}: {}", left.suite, left.what, left.why));
    let left = list("left", left);
    if !left.is_empty() {
        body += &format!("<p>Left out:</p>\n{left}");
    }
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>vnvme, measured</title>\n<style>{STYLE}</style></head>\n\
         <body><main>\n{body}</main></body></html>\n"
    )
}

/// Formats seconds since 1970 as a date such as `2026-11-21` (the days-to-civil algorithm for the
/// proleptic Gregorian calendar).
fn date(seconds: u64) -> String {
    if seconds == 0 {
        return String::new();
    }
    let days = seconds / 86_400 + 719_468;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted() {
        assert_eq!(date(86_399), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_795_305_600), "2026-11-22");
    }

    #[test]
    fn text_is_escaped_in_html() {
        assert_eq!(escape("<a b=\"c\">&"), "&lt;a b=&quot;c&quot;&gt;&amp;");
    }
}
