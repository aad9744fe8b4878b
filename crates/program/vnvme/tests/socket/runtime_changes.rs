//! Changes at run time: they are recorded before they are answered, survive the process, and are
//! not undone by a reload that is about another disk.

use crate::common::*;
use crate::failure_domains::{Domain, command, controller};
use control::ClientError;
use control::api::{ErrorAction, ErrorChange, LimitChange};
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

/// Returns the disk's limit of requests per second, by volume.
fn iops(domain: &Domain) -> Vec<(String, u64, Option<u32>)> {
    let limits = domain.client.limits(&LimitChange::default()).unwrap();
    let limits = limits.into_iter();
    let limits = limits.map(|one| (one.volume, one.iops, one.weight));
    limits.collect()
}

/// Returns the error policies of all volumes.
fn policies(domain: &Domain) -> Vec<(String, ErrorAction, ErrorAction)> {
    let policies = domain.client.on_error(&ErrorChange::default()).unwrap();
    let policies = policies.into_iter();
    let policies = policies.map(|one| (one.volume, one.on_read_error, one.on_write_error));
    policies.collect()
}

fn succeeds(domain: &Domain, words: &[&str]) {
    let (code, said) = command(domain, words);
    assert_eq!(code, Some(0), "{words:?}: {said}");
}

/// Limits, weights and policies are those that were set last, whatever happens to the process; and
/// a configuration that is saved has them.
#[test]
fn settings_survive_kill_and_upgrade_and_are_saved() {
    let test_dir = TestDir::new();
    let files = ["a1.raw", "a2.raw", "b.raw", "c.raw"].map(|name| test_dir.disk(name, 1 << 20));
    let [a1, a2, b, c] = &files;
    let (first, second) = (
        format!("{a1}?iops=0&weight=7"),
        format!("{a2}?iops=1000&bps=1G"),
    );
    let export = text(&test_dir.path("c.sock"));
    let disks = controller(&test_dir, "a", &[&first, &second], "")
        + &controller(&test_dir, "b", &[b], "")
        + &format!("[[vhost-user-blk]]\nsocket = \"{export}\"\nvolume = \"{c}?iops=5\"\n");
    let domain = Domain::start(test_dir, &disks);
    let mut guest = domain.host("a");
    guest.write(1, 0, &pattern(1, 4096));
    for words in [
        &[
            "limits", "a", "--nsid", "2", "--iops", "70000", "--burst", "20ms",
        ][..],
        &["limits", "a", "--nsid", "1", "--weight", "9"],
        &["limits", "c", "--iops", "6"],
        &[
            "on-error",
            "a",
            "--nsid",
            "1",
            "--on-write-error",
            "enospc-stop",
        ],
        &["on-error", "c", "--on-read-error", "retry"],
    ] {
        succeeds(&domain, words);
    }
    let limits = [
        (first.clone(), 0, Some(9)),
        (second.clone(), 70_000, None),
        (format!("{c}?iops=5"), 6, None),
    ];
    let report = ErrorAction::Report;
    let policy = [
        (first.clone(), report, ErrorAction::EnospcStop),
        (second.clone(), report, report),
        (b.clone(), report, report),
        (format!("{c}?iops=5"), ErrorAction::Retry, report),
    ];
    for round in 0..4 {
        assert_eq!(iops(&domain), limits, "{round}");
        assert_eq!(policies(&domain), policy, "{round}");
        assert!(guest.read(1, 0, 4096) == pattern(1, 4096), "{round}");
        match round {
            0 | 2 => domain.kill(),
            _ => succeeds(&domain, &["upgrade"]),
        }
    }
    // A saved configuration is that of the running disks: a reload changes nothing.
    let (code, saved) = command(&domain, &["save"]);
    assert_eq!(code, Some(0), "{saved}");
    for words in [
        "iops=70000",
        "burst=20000us",
        "weight=9",
        "on-write-error = \"enospc-stop\"",
    ] {
        assert!(saved.contains(words), "{words}: {saved}");
    }
    let config = domain.test_dir.path("vnvme.toml");
    fs::write(&config, saved).unwrap();
    let check = Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["check", &text(&config)])
        .output()
        .unwrap();
    assert!(check.status.success(), "{check:?}");
    let plan = domain.client.reload().unwrap();
    assert_eq!(plan.unchanged, ["a", "b", "c"], "{plan:?}");
    drop(guest);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    let disks = fs::read_to_string(&config).unwrap();
    let domain = Domain::start(test_dir, &disks);
    let after: Vec<(u64, Option<u32>)> = iops(&domain)
        .into_iter()
        .map(|(_, iops, weight)| (iops, weight))
        .collect();
    assert_eq!(after, [(0, Some(9)), (70_000, None), (6, None)]);
    let after: Vec<ErrorAction> = policies(&domain).into_iter().map(|one| one.2).collect();
    assert_eq!(after, [ErrorAction::EnospcStop, report, report, report]);
    domain.daemon.end();
}

/// Has each write of the state fail as on a full file system.
fn fill(test_dir: &TestDir) {
    let _ = fs::remove_file(test_dir.path("state.new"));
    symlink("/dev/full", test_dir.path("state.new")).unwrap();
}

/// With `--state` on a full file system an operation fails, and nothing has changed: neither for
/// the guests nor after a restart.
#[test]
fn operation_that_cannot_be_recorded_fails_and_changes_nothing() {
    let test_dir = TestDir::new();
    let files = ["a", "b", "c", "d"].map(|name| test_dir.disk(&format!("{name}.raw"), 1 << 20));
    let [a, b, c, d] = &files;
    let (state, allow) = (
        text(&test_dir.path("state")),
        text(test_dir.path("x").parent().unwrap()),
    );
    let options = ["--state", &state, "--allow", &allow, "--sandbox", "off"];
    let disks = controller(&test_dir, "a", &[a], "");
    let domain = Domain::start_with(test_dir, &disks, &options);
    let socket = |name: &str| {
        format!(
            "socket={}",
            text(&domain.test_dir.path(&format!("{name}.sock")))
        )
    };
    let (sockets, limited) = (["b", "d"].map(socket), format!("{b}?iops=0"));
    succeeds(&domain, &["add", "controller", &sockets[0], &limited]);
    let mut guest = domain.host("b");
    guest.write(1, 0, &pattern(1, 4096));
    let before = (
        fs::read_to_string(&state).unwrap(),
        domain.client.disks().unwrap(),
    );
    let operations = [
        &["add", "controller", &sockets[1], d][..],
        &["attach", "b", c],
        &["limits", "b", "--iops", "9"],
        &["on-error", "b", "--on-read-error", "stop"],
        &["detach", "b", "1"],
        &["remove", "b", "--force"],
    ];
    for words in operations {
        fill(&domain.test_dir);
        let (code, said) = command(&domain, words);
        assert_eq!(code, Some(1), "{words:?}: {said}");
        assert!(
            said.contains("No space left on device"),
            "{words:?}: {said}"
        );
        assert!(!domain.test_dir.path("d.sock").exists());
        let now = (
            fs::read_to_string(&state).unwrap(),
            domain.client.disks().unwrap(),
        );
        assert_eq!(now, before, "{words:?}");
        assert!(guest.read(1, 0, 4096) == pattern(1, 4096), "{words:?}");
        assert_eq!(iops(&domain)[0].1, 0, "{words:?}");
        assert!(
            policies(&domain)
                .iter()
                .all(|one| one.1 == ErrorAction::Report)
        );
        let _ = fs::remove_file(domain.test_dir.path("state.new"));
        domain.kill();
        let now = domain.client.disks().unwrap();
        assert_eq!(now, before.1, "{words:?}");
    }
    // With room again, each of them is there after the end and a new start.
    succeeds(&domain, operations[0]);
    succeeds(&domain, operations[1]);
    succeeds(&domain, operations[2]);
    drop(guest);
    let Domain {
        test_dir, daemon, ..
    } = domain;
    daemon.end();
    let domain = Domain::start_with(test_dir, &disks, &options);
    let names = domain.client.disks().unwrap().into_iter();
    let names: Vec<(String, usize)> = names.map(|d| (d.name, d.namespaces.len())).collect();
    assert_eq!(names, [("a".into(), 1), ("b".into(), 2), ("d".into(), 1)]);
    assert_eq!(iops(&domain)[0].1, 9);
    domain.daemon.end();
}

/// A reload applies what has changed in the file since it was read before, also by an earlier
/// process; all that was changed by request stays.
#[test]
fn reload_about_another_disk_keeps_changes_at_run_time() {
    let test_dir = TestDir::new();
    let files = ["a1", "a2", "a3", "a4", "b", "c"].map(|name| test_dir.disk(name, 1 << 20));
    let [a1, a2, a3, a4, b, c] = &files;
    let (config, allow) = (
        test_dir.path("vnvme.toml"),
        text(test_dir.path("x").parent().unwrap()),
    );
    let [of_b, of_c] =
        [("b", b), ("c", c)].map(|(name, file)| controller(&test_dir, name, &[file], ""));
    let of_a = |test_dir: &TestDir, volumes: &[&str]| {
        let disk = controller(test_dir, "a", volumes, "");
        format!("[process]\nallow = [\"{allow}\"]\n{disk}")
    };
    let disks = of_a(&test_dir, &[a1, a2]) + &of_b + &of_c;
    let domain = Domain::start(test_dir, &disks);
    let mut guest = domain.host("a");
    guest.write(1, 0, &pattern(1, 4096));
    let blocks = |guest: &mut Host| {
        let nsids = 1..=4;
        nsids
            .map(|nsid| guest.identify_namespace(nsid).unwrap().nsze.get())
            .collect::<Vec<_>>()
    };
    succeeds(&domain, &["attach", "a", a3]);
    succeeds(&domain, &["detach", "a", "2"]);
    succeeds(&domain, &["remove", "c"]);
    let reload = |disks: &str| {
        fs::write(&config, disks).unwrap();
        let plan = domain.client.reload().unwrap();
        assert!(plan.refused.is_empty(), "{plan:?}");
        (plan.added, plan.removed, plan.changed)
    };
    let none = Vec::<String>::new;
    for round in 0..3 {
        assert_eq!(blocks(&mut guest), [2048, 0, 2048, 0], "{round}");
        let queues = of_b.replace("name =", &format!("io-queues = {}\nname =", round + 2));
        let changed = reload(&(of_a(&domain.test_dir, &[a1, a2]) + &queues + &of_c));
        assert_eq!(changed, (none(), none(), vec!["b".into()]), "{round}");
        assert_eq!(blocks(&mut guest), [2048, 0, 2048, 0], "{round}");
        assert!(guest.read(1, 0, 4096) == pattern(1, 4096), "{round}");
        assert!(domain.client.disk("c").is_err(), "{round}");
        domain.kill();
    }
    // A namespace that the file gains is attached; one that it loses is detached.
    let fourth = format!(" }}, {{ volume = \"{a4}\", nsid = 4 }}]\n");
    let more = of_a(&domain.test_dir, &[a1, a2]).replace(" }]\n", &fourth);
    assert_eq!(reload(&(more + &of_b)).2, ["a", "b"]);
    assert_eq!(blocks(&mut guest), [2048, 0, 2048, 2048]);
    let text = of_a(&domain.test_dir, &[a1]);
    assert_eq!(reload(&(text.clone() + &of_b)).2, ["a"]);
    assert_eq!(blocks(&mut guest), [2048, 0, 2048, 0]);
    // The file loses a disk, and gains it: then the disk is served again, though it was removed by
    // request.
    assert_eq!(reload(&(text.clone() + &of_b + &of_c)).0, ["c"]);
    // A file that has all of it changes nothing.
    let (code, saved) = command(&domain, &["save"]);
    assert_eq!(code, Some(0), "{saved}");
    assert_eq!(reload(&saved), (none(), none(), none()));
    // By now the file has the third namespace, too, and may lose it.
    assert_eq!(reload(&(text + &of_b + &of_c)).2, ["a"]);
    assert_eq!(blocks(&mut guest), [2048, 0, 0, 0]);
    drop(guest);
    domain.daemon.end();
}

fn disk_error<T>(result: Result<T, ClientError>) -> String {
    result
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default()
}

/// The configuration is recorded with the disks that it gave, or a reload has no effect.
#[test]
fn reload_that_cannot_be_recorded_is_undone() {
    let test_dir = TestDir::new();
    let files = ["a", "b"].map(|name| test_dir.disk(&format!("{name}.raw"), 1 << 20));
    let [a, b] = &files;
    let (state, allow) = (
        text(&test_dir.path("state")),
        text(test_dir.path("x").parent().unwrap()),
    );
    let options = ["--state", &state, "--allow", &allow, "--sandbox", "off"];
    let disks = controller(&test_dir, "a", &[a], "");
    let domain = Domain::start_with(test_dir, &disks, &options);
    let socket = format!("socket={}", text(&domain.test_dir.path("b.sock")));
    succeeds(&domain, &["add", "controller", &socket, b]);
    // The file takes the added disk over, so the state loses it.
    let more = disks.clone() + &controller(&domain.test_dir, "b", &[b], "");
    fs::write(domain.test_dir.path("vnvme.toml"), &more).unwrap();
    fill(&domain.test_dir);
    let error = disk_error(domain.client.reload());
    assert!(error.contains("No space left on device"), "{error}");
    assert!(fs::read_to_string(&state).unwrap().contains("b.sock"));
    domain.client.reload().unwrap();
    assert!(!fs::read_to_string(&state).unwrap().contains("b.sock"));
    // A reload without the disk removes it: it is the configuration's by now.
    fs::write(domain.test_dir.path("vnvme.toml"), &disks).unwrap();
    assert_eq!(domain.client.reload().unwrap().removed, ["b"]);
    domain.daemon.end();
}

/// Reads until a request of the volume has had to wait for its limits.
fn wait_throttled(domain: &Domain, guest: &mut Host, volume: &str) {
    let delayed = || {
        let limits = domain.client.limits(&LimitChange::default()).unwrap();
        let mut limits = limits.into_iter().filter(|one| one.volume == volume);
        limits.next().map_or(0, |one| one.delayed)
    };
    eventually("a request waits", || {
        guest.read(1, 0, 4096);
        delayed() > 0
    });
}

/// A disk that was started without limits gets them while a guest uses it, also one whose requests
/// are done within the call; and has them after a kill and an upgrade.
#[test]
fn limits_of_disk_without_limits_take_effect_and_survive() {
    let test_dir = TestDir::new();
    let file = test_dir.disk("a.raw", 1 << 20);
    let memory = "mem://1M".to_owned();
    let disks =
        controller(&test_dir, "a", &[&file], "") + &controller(&test_dir, "b", &[&memory], "");
    let domain = Domain::start(test_dir, &disks);
    assert_eq!(iops(&domain), []);
    for (name, volume) in [("a", &file), ("b", &memory)] {
        let mut guest = domain.host(name);
        guest.write(1, 0, &pattern(1, 4096));
        assert!(guest.read(1, 0, 4096) == pattern(1, 4096));
        succeeds(&domain, &["limits", name, "--iops", "20", "--burst", "1ms"]);
        wait_throttled(&domain, &mut guest, volume);
        for round in 0..2 {
            match round {
                0 => domain.kill(),
                _ => succeeds(&domain, &["upgrade"]),
            }
            domain.wait_served(name);
            let own = iops(&domain).into_iter().find(|one| one.0 == *volume);
            assert_eq!(own, Some((volume.clone(), 20, None)), "{round}");
            wait_throttled(&domain, &mut guest, volume);
            assert!(guest.read(1, 0, 4096) == pattern(1, 4096), "{round}");
        }
        succeeds(&domain, &["limits", name, "--iops", "0"]);
        assert!(guest.read(1, 0, 4096) == pattern(1, 4096));
    }
    // A file can have a share of its device at any time; memory is nobody else's.
    succeeds(&domain, &["limits", "a", "--weight", "9"]);
    let (code, said) = command(&domain, &["limits", "b", "--weight", "9"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("mem://1M cannot have a weight"), "{said}");
    let mut guest = domain.host("a");
    assert!(guest.read(1, 0, 4096) == pattern(1, 4096));
    assert_eq!(iops(&domain)[0], (file, 0, Some(9)));
    domain.daemon.end();
}

/// A reload gives a disk with a client other limits, another weight and another policy, beside all
/// other changes; a reload that is refused says what it would have done.
#[test]
fn reload_changes_settings_of_attached_disk() {
    let test_dir = TestDir::new();
    let files = ["a.raw", "b.raw", "c.raw"].map(|name| test_dir.disk(name, 1 << 20));
    let [a, b, c] = &files;
    let export = text(&test_dir.path("c.sock"));
    let config = test_dir.path("vnvme.toml");
    let allow = text(test_dir.path("x").parent().unwrap());
    let process = format!("[process]\nallow = [\"{allow}\"]\n");
    let socket = |name: &str| test_dir.path(&format!("{name}.sock"));
    let of = |name: &str, lines: &str| {
        let socket = text(&socket(name));
        format!("[[controller]]\nname = \"{name}\"\nsocket = \"{socket}\"\n{lines}\n")
    };
    let exported = |options: &str| {
        format!("[[vhost-user-blk]]\nsocket = \"{export}\"\nvolume = \"{c}{options}\"\n")
    };
    let plain = |file: &str| format!("namespace = [{{ volume = \"{file}\" }}]");
    let limited = format!(
        "namespace = [{{ volume = \"{a}?iops=20&burst=1ms&weight=7\", on-write-error = \
         \"enospc-stop\" }}]"
    );
    let first = process.clone() + &of("a", &plain(a)) + &exported("");
    let second = process.clone() + &of("a", &limited) + &of("b", &plain(b)) + &exported("?iops=5");
    let refused = process.clone() + &of("a", &plain(b)) + &of("d", &plain(c)) + &exported("");
    let third = process + &of("a", &plain(a)) + &of("b", &plain(b)) + &exported("");
    let domain = Domain::start(test_dir, &first);
    let mut guest = domain.host("a");
    guest.write(1, 0, &pattern(1, 4096));
    fs::write(&config, &second).unwrap();
    let plan = domain.client.reload().unwrap();
    assert_eq!(plan.refused, []);
    assert_eq!(plan.added, ["b"]);
    assert_eq!(plan.changed, ["a", "c"]);
    wait_throttled(&domain, &mut guest, a);
    for round in 0..2 {
        let limits: Vec<_> = iops(&domain)
            .into_iter()
            .map(|one| (one.1, one.2))
            .collect();
        assert_eq!(limits, [(20, Some(7)), (5, None)], "{round}");
        let policies = policies(&domain);
        assert_eq!(policies[0].2, ErrorAction::EnospcStop, "{policies:?}");
        assert!(guest.read(1, 0, 4096) == pattern(1, 4096), "{round}");
        domain.kill();
        domain.wait_served("a");
        domain.wait_served("c");
    }
    // Read again, the file changes nothing.
    let plan = domain.client.reload().unwrap();
    assert_eq!(plan.unchanged, ["a", "b", "c"], "{plan:?}");
    fs::write(&config, &refused).unwrap();
    let (code, said) = command(&domain, &["reload"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("would be added: d"), "{said}");
    // Without settings in the file there are none; those that were set by request are gone, too.
    succeeds(&domain, &["limits", "a", "--bps", "1G"]);
    fs::write(&config, &third).unwrap();
    assert_eq!(domain.client.reload().unwrap().changed, ["a", "c"]);
    assert!(iops(&domain).iter().all(|one| one.1 == 0));
    let bps = domain.client.limits(&LimitChange::default()).unwrap();
    assert!(bps.iter().all(|one| one.bps == 0), "{bps:?}");
    assert!(
        policies(&domain)
            .iter()
            .all(|one| one.2 == ErrorAction::Report)
    );
    assert!(guest.read(1, 0, 4096) == pattern(1, 4096));
    drop(guest);
    domain.daemon.end();
}
