use super::super::rates::{QueueRates, WorkerRates};
use super::*;
use metrics::Distribution;

fn times(nanoseconds: &[u64]) -> RecentTimes {
    let histogram = probes::Histogram::new();
    nanoseconds.iter().for_each(|ns| histogram.record(*ns));
    RecentTimes {
        times: Distribution::of(&histogram, 1.0),
        is_longer: false,
    }
}

fn disk(name: &str, kind: &'static str, iops: f64, p99: u64) -> DiskRates {
    DiskRates {
        name: name.into(),
        kind: kind.to_owned(),
        address: format!("/run/vnvme/{name}.sock"),
        connected: true,
        in_flight: 3,
        depth: Some(2.5),
        workers: vec![0],
        namespaces: vec![NamespaceRates {
            nsid: 1,
            volume: "/srv/disk.raw".into(),
            operations: [iops, 0.0, 0.0, 0.0],
            read: iops * 4096.0,
            latency: [times(&[p99, p99]), times(&[]), times(&[]), times(&[])],
            ..NamespaceRates::default()
        }],
        queues: vec![QueueRates {
            id: 1,
            worker: Some(0),
            commands: iops,
            in_flight: 3,
            mmio: 0.015,
            ..QueueRates::default()
        }],
        latency: times(&[p99, p99]),
        ..DiskRates::default()
    }
}

fn three() -> Rates {
    Rates {
        at_ns: 0,
        disks: vec![
            disk("backup", "vhost-user-blk", 120.0, 8_000_000),
            disk("db-0", "controller", 812_345.0, 15),
            disk("web", "ublk", 20_480.0, 31),
        ],
        workers: ["0", "1"]
            .map(|name| WorkerRates {
                name: name.into(),
                busy: 0.5,
                polling: 0.25,
                asleep: 0.25,
            })
            .into(),
        cpu: 1.5,
        resident: Some(100 << 20),
        unanswered: Vec::new(),
    }
}

fn text(rates: &Rates, choices: &Choices) -> String {
    let lines = screen(rates, choices, 80, Some(24));
    let lines: Vec<String> = lines.into_iter().map(|line| line.text).collect();
    lines.join("\n")
}

#[test]
fn screen_matches_expected_text() {
    let wanted = "\
3 disks   833k IOPS   read 3.2GiB/s   write 0B/s   cpu 150%   memory 100MiB
workers, % busy/polling/asleep   0: 50/25/25   1: 50/25/25
sorted by iops
DISK             KIND     IOPS   READ/s  WRITE/s     P50     P99  DEPTH  WAIT  W
db-0             ctrl     812k   3.1GiB       0B  15.0ns  15.0ns    2.5     -  0
web              ublk    20.5k  80.0MiB       0B  31.0ns  31.0ns    2.5     -  0
backup           vhost     120   480KiB       0B   8.1ms   8.1ms    2.5     -  0
q quit   s sort   / filter   j/k or arrows select   enter queues";
    let found = text(&three(), &Choices::default());
    assert_eq!(found, wanted, "\n{found}");
}

#[test]
fn screen_fits_terminal() {
    let mut rates = three();
    let name = "\u{1b}[31mevil\n\u{202e}磁盘磁盘磁盘磁盘磁盘磁盘磁盘";
    rates.disks.push(disk(name, "controller", 9e15, u64::MAX));
    rates
        .disks
        .extend((0..500).map(|i| disk(&format!("d{i}"), "ublk", 1.0, 1)));
    let mut choices = Choices::default();
    for opened in [false, true] {
        if opened {
            choices.press(Key::Enter, &rates);
        }
        for (width, height) in [(80, 24), (40, 10), (1, 1), (200, 600), (80, 3)] {
            let lines = screen(&rates, &choices, width, Some(height));
            assert!(lines.len() <= height, "{width} x {height}: {}", lines.len());
            for line in lines {
                let used: usize = line.text.chars().map(columns).sum();
                assert!(used <= width, "{width}: {line:?}");
                assert!(!line.text.chars().any(char::is_control), "{line:?}");
                assert!(!line.text.contains('\u{202e}'), "{line:?}");
            }
        }
    }
}

#[test]
fn keys_sort_filter_open_and_quit() {
    let rates = three();
    let mut choices = Choices::default();
    let first = |choices: &Choices| choices.shown(&rates)[0].name.clone();
    assert_eq!(first(&choices), "db-0");
    choices.press(Key::Char('s'), &rates);
    assert_eq!(
        (choices.sort, first(&choices)),
        (Sort::Bandwidth, "db-0".into())
    );
    choices.press(Key::Char('s'), &rates);
    assert_eq!(
        (choices.sort, first(&choices)),
        (Sort::P99, "backup".into())
    );
    for _ in 0..3 {
        choices.press(Key::Char('s'), &rates);
    }
    assert_eq!(choices.sort, Sort::Iops);

    // A typed filter is no command.
    for key in "/qs".chars().map(Key::Char) {
        assert!(!choices.press(key, &rates));
    }
    assert!(text(&rates, &choices).contains("no disk's name has this"));
    for key in [Key::Backspace, Key::Backspace, Key::Char('w'), Key::Enter] {
        choices.press(key, &rates);
    }
    let shown = text(&rates, &choices);
    assert!(
        shown.contains("filter: w") && shown.contains("web"),
        "{shown}"
    );
    assert!(!shown.contains("db-0"), "{shown}");

    choices.press(Key::Enter, &rates);
    let shown = text(&rates, &choices);
    assert!(
        shown.contains("QUEUE WORKER") && shown.contains("0.015"),
        "{shown}"
    );
    assert!(shown.contains("/srv/disk.raw"), "{shown}");
    choices.press(Key::Escape, &rates);
    assert!(text(&rates, &choices).contains("DISK "));
    choices.press(Key::Escape, &rates);
    assert_eq!(choices.filter, "");
    assert!(choices.press(Key::Char('q'), &rates));
    assert!(Choices::default().press(Key::Char('\u{3}'), &rates));
}

#[test]
fn cursor_stays_on_disk_and_screen() {
    let mut rates = three();
    rates
        .disks
        .extend((0..100).map(|i| disk(&format!("x{i:03}"), "ublk", 1.0, 1)));
    let mut choices = Choices::default();
    for _ in 0..60 {
        choices.press(Key::Down, &rates);
    }
    let on_cursor = |choices: &Choices, rates: &Rates| {
        let lines = screen(rates, choices, 80, Some(24));
        let found = lines.iter().find(|line| line.cursor).unwrap();
        found.text.split(' ').next().unwrap().to_owned()
    };
    let name = on_cursor(&choices, &rates);
    // Another order: it is on the same disk.
    choices.press(Key::Char('s'), &rates);
    assert_eq!(on_cursor(&choices, &rates), name);
    for _ in 0..200 {
        choices.press(Key::Up, &rates);
    }
    assert_eq!(on_cursor(&choices, &rates), "db-0");
    // The disk disappears.
    rates.disks.clear();
    let lines = screen(&rates, &choices, 80, Some(24));
    assert!(lines.iter().all(|line| !line.cursor));
    choices.press(Key::Down, &rates);
    choices.press(Key::Enter, &rates);
    screen(&rates, &choices, 80, Some(24));
}

#[test]
fn numbers_are_abbreviated() {
    for (value, shown) in [
        (0.0, "0"),
        (7.0, "7"),
        (0.25, "0.2"),
        (999.4, "999"),
        (999.9, "1.0k"),
        (1234.0, "1.2k"),
        (99_960.0, "100k"),
        (5e9, "5.0G"),
    ] {
        assert_eq!(count_of(value), shown, "{value}");
    }
    assert_eq!(bytes_of(1536.0), "1.5KiB");
    assert_eq!(time_of(1_500_000), "1.5ms");
    assert_eq!(time_of(u64::MAX), "18446744074s");
}

#[test]
fn latencies_over_longer_interval_are_marked() {
    let mut rates = three();
    let shown = text(&rates, &Choices::default());
    assert!(!shown.contains('*'), "{shown}");
    rates.disks[0].latency.is_longer = true;
    rates.disks[0].namespaces[0].latency[0].is_longer = true;
    let mut choices = Choices::default();
    let shown = text(&rates, &choices);
    assert!(
        shown.contains("  8.1ms*  8.1ms* ") && shown.contains("  15.0ns  15.0ns "),
        "{shown}"
    );
    assert!(
        shown.contains("\nsorted by iops   * of a longer time: one of 61 commands is timed\n"),
        "{shown}"
    );
    for key in [Key::Down, Key::Down, Key::Down, Key::Enter] {
        choices.press(key, &rates);
    }
    let shown = text(&rates, &choices);
    assert!(shown.contains("read         120"), "{shown}");
    assert!(shown.contains("8.1ms*"), "{shown}");
    // An idle disk shows no times, however old its last ones are.
    rates.disks[0].namespaces[0].operations = [0.0; 4];
    let shown = text(&rates, &choices);
    assert!(!shown.contains("8.1ms"), "{shown}");
}

#[test]
fn stopped_and_failing_disks_are_shown_at_the_top() {
    let mut rates = three();
    let shown = |rates: &Rates| {
        let lines = screen(rates, &Choices::default(), 120, None);
        lines.into_iter().map(|line| line.text).collect::<Vec<_>>()
    };
    assert!(shown(&rates)[3].starts_with("DISK"));
    (rates.disks[0].held, rates.disks[0].failed) = (2, 1.0);
    rates.disks[1].failed = 12.0;
    assert_eq!(
        shown(&rates)[3],
        "backup STOPPED: 2 wait for vnvme resume   db-0 FAILS: 12 errors/s"
    );
}

#[test]
fn instances_are_shown_with_their_names_and_silent_ones_with_reasons() {
    let mut rates = Rates::default();
    rates.add("vnvme@vm0", three());
    rates.add("vnvme@vm1", three());
    rates.unanswered = ["a", "b", "c", "d", "e"]
        .map(|name| format!("vnvme@{name} does not answer: it has ended"))
        .into();
    let shown = |width: usize| {
        let lines = screen(&rates, &Choices::default(), width, None);
        lines.into_iter().map(|line| line.text).collect::<Vec<_>>()
    };
    let lines = shown(200);
    assert!(lines[0].starts_with("6 disks   1.7M IOPS"), "{lines:#?}");
    assert!(lines[0].ends_with("cpu 300%   memory 200MiB"), "{lines:#?}");
    assert!(
        lines[1].ends_with("vnvme@vm0 1: 50/25/25   vnvme@vm1 0: 50/25/25   vnvme@vm1 1: 50/25/25"),
        "{lines:#?}"
    );
    assert_eq!(lines[3], "vnvme@a does not answer: it has ended");
    assert_eq!(lines[6], "2 more instances do not answer");
    assert!(lines[8].starts_with("vnvme@vm0/db-0   ctrl "), "{lines:#?}");
    assert!(
        lines[12].starts_with("vnvme@vm0/backup vhost "),
        "{lines:#?}"
    );
    // A long name gets the columns of a wide screen, and is cut on a narrow one.
    rates.disks[0].name = "vnvme@vm0/a-long-name".into();
    let shown = |width: usize| {
        let lines = screen(&rates, &Choices::default(), width, None);
        lines.into_iter().map(|line| line.text).collect::<Vec<_>>()
    };
    assert!(shown(100)[12].starts_with("vnvme@vm0/a-long-name vhost "));
    assert!(shown(80)[12].starts_with("vnvme@vm0/a-lon~ vhost "));
}
