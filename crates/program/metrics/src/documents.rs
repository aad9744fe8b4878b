//! Checks of the texts about metrics against the table: the documentation, which is generated from
//! it, Grafana's dashboard, and the page.

use crate::{INSTANCE_UP, Type, metrics};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../..")
        .join(path)
}

/// The text between these lines of docs/metrics.md is made of the table.
const BEGIN: &str = "<!-- The table is made by VNVME_WRITE_DOCS=1 cargo test -p metrics. -->\n";
const END: &str = "<!-- The table ends. -->\n";

fn table() -> String {
    let mut text =
        String::from("\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n");
    for metric in metrics().chain([&INSTANCE_UP]) {
        let labels: Vec<String> = metric.labels.iter().map(|l| format!("`{l}`")).collect();
        text.push_str(&format!(
            "| `{}` | {} | {} | {} | {} |\n",
            metric.name,
            metric.kind.name(),
            metric.unit,
            labels.join(", "),
            metric.help
        ));
    }
    text.push('\n');
    text
}

#[test]
fn documentation_lists_every_metric() {
    let path = repository("docs/metrics.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (found, after) = rest.split_once(END).unwrap();
    let made = table();
    if std::env::var_os("VNVME_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{made}{END}{after}")).unwrap();
        return;
    }
    assert!(found == made, "docs/metrics.md: run `make docs`");
}

/// Returns the names of metrics in an expression of PromQL: words with our prefixes.
fn names(expression: &str) -> Vec<&str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|word| word.starts_with("vnvme_") || word.starts_with("process_"));
    ours.collect()
}

fn is_known(name: &str) -> bool {
    metrics().any(|metric| match metric.kind {
        Type::Histogram => {
            let part = name.strip_prefix(metric.name);
            part.is_some_and(|part| ["_bucket", "_sum", "_count"].contains(&part))
        }
        Type::Counter | Type::Gauge => metric.name == name,
    })
}

/// Collects every text under one of these keys, at any depth.
fn texts<'a>(value: &'a Value, keys: &[&str], found: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(text) if keys.contains(&&**key) => found.push(text),
                    value => texts(value, keys, found),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| texts(value, keys, found)),
        _ => {}
    }
}

#[test]
fn dashboard_uses_existing_metrics_only() {
    let text = std::fs::read_to_string(repository("packaging/grafana/vnvme.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut expressions = Vec::new();
    texts(
        &dashboard,
        &["expr", "query", "definition"],
        &mut expressions,
    );
    let asked: Vec<&str> = expressions.iter().flat_map(|e| names(e)).collect();
    assert!(asked.len() >= 25, "{asked:?}");
    for name in &asked {
        assert!(is_known(name), "the dashboard asks for {name}");
    }
    // Each panel has something to show, and a counter is shown as a rate.
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title}");
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            assert!(!names(expression).is_empty(), "{title}");
            if names(expression)
                .iter()
                .any(|name| name.ends_with("_total"))
            {
                let rate = expression.contains("rate(") || expression.contains("increase(");
                assert!(rate, "{title}: {expression}");
            }
        }
    }
    assert!(!is_known("vnvme_operations") && !is_known("vnvme_command_latency_seconds"));
}

/// The page is drawn before the first answer, and again when there are rates: two answers later.
#[test]
fn page_shows_loading_until_it_has_rates() {
    let page = crate::PAGE;
    let at = |text: &str| {
        assert_eq!(page.matches(text).count(), 1, "{text}");
        page.find(text).unwrap()
    };
    assert!(page.contains("rated = false"));
    let state = "$(\"none\").textContent = !rated ? \"loading\" : rows.length ? ";
    assert!(at(state) < at("\"no disks are served\""));
    // Rates exist first, and the page says so then.
    assert!(at("function take(now) {") < at("rows = rates(now, before, kept);"));
    assert!(at("rows = rates(now, before, kept);") < at("rated = true;"));
    assert!(at("rated = true;") < at("async function tick() {"));
    // The page is drawn (by the selection) before the first request.
    assert!(page.ends_with("select();\ntick();\n</script>\n</html>\n"));
}

#[test]
fn page_loads_nothing_and_reads_snapshot_fields() {
    let page = crate::PAGE;
    for foreign in [
        "http://",
        "https://",
        "//cdn",
        "<script src",
        "<link rel=\"stylesheet\"",
        "@import",
    ] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    // Names are untrusted: nothing is written as markup.
    for unsafe_way in [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ] {
        assert!(!page.contains(unsafe_way), "{unsafe_way}");
    }
    let snapshot = serde_json::to_value(crate::prometheus::example()).unwrap();
    let text = snapshot.to_string();
    for field in [
        "at_ns",
        "disks",
        "namespaces",
        "queues",
        "operations",
        "latency",
        "errors",
        "bytes_read",
        "bytes_written",
        "steps",
        "commands",
        "completions",
        "mmio_doorbells",
        "interrupts",
        "limits",
        "throttled_ns",
        "workers",
        "busy_ns",
        "polling_ns",
        "asleep_ns",
        "wake_ups",
        "process",
        "cpu_ns",
        "resident",
        "version",
    ] {
        assert!(page.contains(field), "the page does not read {field}");
        assert!(
            text.contains(&format!("\"{field}\"")),
            "a snapshot has no {field}"
        );
    }
}
