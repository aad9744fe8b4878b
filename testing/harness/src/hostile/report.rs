//! Tables for people.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::outcome::{AttackLimits, AttackOutcome};

/// Above the lines of [`line`].
pub(super) const HEAD: &str = "| attack | ratio | longest read, ms | blocked, ms | memory, MiB | \
descriptors | log, KiB/s | control, ms | newcomer, ms | SIGTERM, s | does not hold |\n|---|---|---|---|---|---|---|---|---|---|---|";

fn or_none<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "none".to_owned(), show)
}

fn millis(time: Option<Duration>) -> String {
    or_none(time, |t| format!("{:.1}", t.as_secs_f64() * 1e3))
}

/// Formats the line of an attack.
pub(super) fn line(outcome: &AttackOutcome, limits: AttackLimits) -> String {
    if let Some(why) = &outcome.skipped {
        return format!("| {} | skipped: {why} |", outcome.name);
    }
    let change = |from: Option<String>, to: Option<String>| {
        format!(
            "{} -> {}",
            from.unwrap_or_default(),
            to.unwrap_or_else(|| "none".to_owned())
        )
    };
    let mib = |kib: u64| format!("{:.1}", kib as f64 / 1024.0);
    let (before, after) = (outcome.before, outcome.after);
    let (new, _) = outcome.verdict(limits);
    let fails: Vec<String> = outcome
        .failures(limits)
        .iter()
        .map(|fail| {
            if new.contains(fail) {
                (*fail).to_owned()
            } else {
                format!("{fail} (known)")
            }
        })
        .collect();
    [
        outcome.name.to_owned(),
        or_none(outcome.ratio(), |r| format!("{r:.2}")),
        millis(outcome.longest_read),
        millis(outcome.blocked),
        change(
            before.map(|f| mib(f.rss_kib)),
            after.map(|f| mib(f.rss_kib)),
        ),
        change(
            before.map(|f| f.descriptors.to_string()),
            after.map(|f| f.descriptors.to_string()),
        ),
        or_none(outcome.log_rate, |r| format!("{:.1}", r / 1024.0)),
        millis(outcome.control),
        millis(outcome.newcomer),
        or_none(outcome.end, |t| format!("{:.2}", t.as_secs_f64())),
        fails.join(", "),
    ]
    .iter()
    .fold("|".to_owned(), |all, cell| format!("{all} {cell} |"))
}

fn read(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(serde_json::from_str(&text)?)
}

fn short(one: &Value) -> String {
    if let Some(why) = one["skipped"].as_str() {
        return format!("skipped: {why}");
    }
    let number = |key: &str, digits: usize| {
        one[key]
            .as_f64()
            .map_or_else(|| "none".to_owned(), |n| format!("{n:.digits$}"))
    };
    let fails: Vec<&str> = one["fails"]
        .as_array()
        .map(|fails| fails.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    if fails.contains(&"starts") {
        return "does not start".to_owned();
    }
    if fails.contains(&"alive") {
        return "the process ends".to_owned();
    }
    let fails = if fails.is_empty() {
        "holds".to_owned()
    } else {
        fails.join(", ")
    };
    let reads = one["attacked_iops"].as_f64();
    format!(
        "{} | {} | {fails}",
        reads.map_or_else(|| "none".to_owned(), |n| format!("{:.0}", n / 1000.0)),
        number("longest_read_ms", 1)
    )
}

/// Compares the same attacks on two daemons, from their JSON.
pub(super) fn compare(before: &Path, after: &Path) -> Result<String> {
    let (before, after) = (read(before)?, read(after)?);
    let mut text = String::from(
        "| attack | before: thousand reads/s | longest read, ms | does not hold | after: thousand \
         reads/s | longest read, ms | does not hold |\n|---|---|---|---|---|---|---|\n",
    );
    for new in &after {
        let old = before.iter().find(|old| old["attack"] == new["attack"]);
        let cells = |one: Option<&Value>| {
            let text = one.map_or_else(String::new, short);
            if text.contains('|') {
                text
            } else {
                format!(" | | {text}")
            }
        };
        text.push_str(&format!(
            "| {} | {} | {} |\n",
            new["what"].as_str().unwrap_or_default(),
            cells(old),
            cells(Some(new))
        ));
    }
    Ok(text)
}
