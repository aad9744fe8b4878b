use super::*;
use crate::{Device, KIND_COUNTERS, Limits, OnError, Operations, Process, Type, metrics};
use probes::IoRecord;
use std::collections::BTreeMap;

/// Returns a disk of a kind with counters of its own, each of which is 9.
fn full_of_kind(kind: &KindCounters) -> Disk {
    let counters = kind.rows.iter().map(|(name, _)| ((*name).to_owned(), 9));
    Disk {
        name: format!("the {}", kind.kind),
        kind: kind.kind.to_owned(),
        counters: counters.collect(),
        ..Disk::default()
    }
}

/// Returns a snapshot with every field set.
pub(crate) fn full() -> Snapshot {
    let record = IoRecord::default();
    for (kind, cycles) in IoKind::ALL
        .into_iter()
        .zip([300, 3000, 40_000, 5_000_000_000])
    {
        record.operations(kind).add(61);
        record.timed(kind, cycles);
    }
    record.bytes_read().add(4096);
    record.bytes_written().add(u64::MAX);
    record.failed(Failure::Media);
    record.depth_seen(7);
    let mut namespace = Namespace::new(1);
    namespace.add(&record, 0.5);
    namespace.direct = Some(true);
    (namespace.direct_commands, namespace.direct_bounced) = (11, 3);
    Snapshot {
        at_ns: 1,
        disks: vec![Disk {
            name: "vm0".into(),
            kind: "controller".into(),
            address: "/run/vm0.sock".into(),
            connected: true,
            namespaces: vec![namespace],
            queues: vec![
                Queue {
                    id: 0,
                    commands: 1,
                    ..Queue::default()
                },
                Queue {
                    id: 1,
                    commands: 10,
                    completions: 7,
                    mmio_doorbells: 2,
                    ..Queue::default()
                },
                Queue {
                    id: 2,
                    commands: 3,
                    completions: 4,
                    ..Queue::default()
                },
            ],
            ..Disk::default()
        }]
        .into_iter()
        .chain(KIND_COUNTERS.iter().map(full_of_kind))
        .collect(),
        unserved: vec!["vm1".into()],
        limits: vec![Limits {
            volume: "disk.raw".into(),
            iops: [0, 5, 6],
            throttled_ns: 1_500_000_000,
            weight: Some(100),
            ..Limits::default()
        }],
        on_error: vec![OnError {
            volume: "disk.raw".into(),
            read_errors: 3,
            write_errors: 4,
            no_space: 2,
            repeated: 5,
            held: 6,
        }],
        devices: vec![Device {
            device: "nvme://0000:01:00.0/1".into(),
            state: "live".into(),
            resets: 2,
        }],
        workers: vec![Worker {
            busy_ns: 2_000_000_000,
            cpu_ns: Some(1),
            ..Worker::default()
        }],
        process: Process {
            version: "0".into(),
            resident: Some(1),
            anonymous: Some(1),
            virtual_memory: Some(1),
            threads: Some(1),
            restarts: Some(1),
            last_pause_ns: Some(1),
            ..Process::default()
        },
    }
}

/// Parses the name and labels of each line, and its value.
fn samples(text: &str) -> BTreeMap<&str, &str> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').unwrap()).collect()
}

#[test]
fn exposition_has_every_metric_with_help_and_labels() {
    let text = full().prometheus();
    let all = samples(&text);
    for metric in metrics() {
        let Metric { name, kind, .. } = metric;
        assert_eq!(
            text.matches(&format!("# HELP {name} ")).count(),
            1,
            "{name}"
        );
        assert!(text.contains(&format!("\n# TYPE {name} {}\n", kind.name())));
        let suffix = match kind {
            Type::Histogram => "_count",
            Type::Counter | Type::Gauge => "",
        };
        let of = format!("{name}{suffix}");
        let found = all.keys().find(|key| {
            let rest = key.strip_prefix(&of);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        });
        let found = found.unwrap_or_else(|| panic!("no sample of {name}"));
        let labels = found[of.len()..].trim_matches(['{', '}']);
        let labels = labels.split(',').filter_map(|l| l.split_once('='));
        let labels: Vec<&str> = labels.map(|(label, _)| label).collect();
        assert_eq!(labels, metric.labels, "{name}");
    }
    for name in all.keys().map(|key| key.split('{').next().unwrap()) {
        let plain = ["_bucket", "_sum", "_count"];
        let base = plain.iter().find_map(|suffix| name.strip_suffix(suffix));
        let known = |name: &str| metrics().any(|m| m.name == name);
        assert!(known(name) || base.is_some_and(known), "{name}");
    }
}

#[test]
fn metric_values_have_base_units() {
    let text = full().prometheus();
    let all = samples(&text);
    let value = |key: &str| *all.get(key).unwrap_or_else(|| panic!("no {key}"));
    let of = "{disk=\"vm0\",namespace=\"1\",op=";
    assert_eq!(
        value(&format!("vnvme_operations_total{of}\"flush\"}}")),
        "61"
    );
    assert_eq!(
        value(&format!("vnvme_bytes_total{of}\"write\"}}")),
        "18446744073709551615"
    );
    // 300 cycles of half a nanosecond; their step ends at 303.
    let read = format!("vnvme_command_latency_sampled_seconds_bucket{of}\"read\",le=");
    assert_eq!(value(&format!("{read}\"2e-07\"}}")), "1");
    let write = format!("vnvme_command_latency_sampled_seconds_bucket{of}\"write\",le=");
    assert_eq!(value(&format!("{write}\"1e-06\"}}")), "0");
    assert_eq!(value(&format!("{write}\"2e-06\"}}")), "1");
    let flush = format!("vnvme_command_latency_seconds_sum{of}\"flush\"}}");
    assert_eq!(value(&flush), "0.00002");
    assert_eq!(
        value("vnvme_throttled_seconds_total{volume=\"disk.raw\"}"),
        "1.5"
    );
    assert_eq!(value("vnvme_commands_in_flight{disk=\"vm0\"}"), "3");
    assert_eq!(value("vnvme_commands_total{disk=\"vm0\"}"), "14");
    assert_eq!(
        value("vnvme_errors_total{disk=\"vm0\",namespace=\"1\",kind=\"media\"}"),
        "1"
    );
    assert_eq!(value("vnvme_worker_busy_seconds_total{worker=\"0\"}"), "2");
}

#[test]
fn histogram_bounds_ascend_and_match_labels() {
    for (name, bound) in TIMES {
        let value: f64 = name.parse().unwrap();
        assert_eq!((value * 1e9).round() as u64, bound, "{name}");
        // Prometheus compares the label's text: it is as Go prints the number.
        assert!(name.len() <= 6, "{name}");
    }
    assert!(TIMES.is_sorted_by_key(|(_, bound)| *bound));
    assert!(DEPTHS.is_sorted_by_key(|(_, bound)| *bound));
}

#[test]
fn snapshot_round_trips_through_json() {
    let snapshot = full();
    let text = serde_json::to_string(&snapshot).unwrap();
    let back: Snapshot = serde_json::from_str(&text).unwrap();
    assert_eq!(back, snapshot);
    let operations = Operations {
        read: 61,
        write: 61,
        flush: 61,
        other: 61,
    };
    assert_eq!(back.disks[0].namespaces[0].operations, operations);
}

#[test]
fn exposition_of_thousand_disks_is_bounded() {
    let mut snapshot = full();
    let one = snapshot.disks[0].clone();
    snapshot.disks = (0..1000)
        .map(|i| Disk {
            name: format!("vm{i}"),
            ..one.clone()
        })
        .collect();
    let text = snapshot.prometheus();
    let lines = text.lines().count();
    // Two operations are sampled, two timed: no disk has more than that.
    assert!(lines < 160 * 1000, "{lines} lines");
    assert!(text.len() < 16_000_000, "{} bytes", text.len());
}

/// A counter needs a row of the table and its value by name, as CONTRIBUTING.md describes.
#[test]
fn toy_counter_is_exposed_by_its_row() {
    const TOY: KindCounters = KindCounters {
        kind: "toy",
        rows: &[(
            "turns",
            Metric {
                name: "vnvme_toy_turns_total",
                kind: Type::Counter,
                unit: "turns",
                labels: &["disk"],
                help: "Turns of a toy.",
            },
        )],
    };
    const { assert!(TOY.has_all(&["turns"])) };
    for wrong in [&["turn"][..], &[], &["turns", "more"], &["turnt"]] {
        assert!(!TOY.has_all(wrong), "{wrong:?}");
    }
    let mut snapshot = full();
    snapshot.disks.push(full_of_kind(&TOY));
    let mut page = Page::default();
    snapshot.kind_counters(&mut page, &[TOY]);
    let text = page.0.finish();
    let all = samples(&text);
    assert_eq!(all.len(), 1, "{text}");
    assert_eq!(all["vnvme_toy_turns_total{disk=\"the toy\"}"], "9");
}
