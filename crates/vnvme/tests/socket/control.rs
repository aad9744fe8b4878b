//! Counters by the control socket, and what they tell of shadow doorbells.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Output};
use std::time::Duration;

use crate::common::*;

fn stats(control: &str, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vnvme"))
        .args(["stats", control])
        .args(more)
        .output()
        .unwrap()
}

/// The first controller's counters.
fn counters(control: &str) -> serde_json::Value {
    let output = stats(control, &["--json"]);
    assert!(output.status.success(), "{output:?}");
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    all["controllers"][0].clone()
}

#[test]
fn counters_count() {
    let place = Place::new();
    let control = text(&place.path("control.sock"));
    let daemon = Daemon::serve(&place, &["--control", &control, "mem://4M"]);
    let mode = std::fs::metadata(&control).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(counters(&control)["host_reads"], 0);
    let mut host = Host::up(&place.socket());
    for i in 0..5 {
        host.write(1, i, &pattern(i, 4096));
        host.read(1, i, 8192);
    }
    host.read(1, 0, 512);
    let told = counters(&control);
    assert_eq!(told["socket"], text(&place.socket()));
    assert_eq!(
        (&told["host_reads"], &told["host_writes"]),
        (&6.into(), &5.into())
    );
    assert_eq!(told["bytes_read"], 5 * 8192 + 512);
    assert_eq!(told["bytes_written"], 5 * 4096);
    assert_eq!(told["queues"][1]["qid"], 1);
    assert_eq!(told["queues"][1]["commands"], 11);
    assert_eq!(told["queues"][1]["completions"], 11);
    let table = stats(&control, &[]);
    assert!(table.status.success());
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(
        table.contains("reads 6") && table.contains("writes 5"),
        "{table}"
    );
    drop(host);
    daemon.end();
    assert!(!place.path("control.sock").exists());
    let nobody = stats(&control, &[]);
    assert_eq!(nobody.status.code(), Some(1));
    let line = String::from_utf8(nobody.stderr).unwrap();
    assert!(
        line.contains(&control) && line.contains("running"),
        "{line}"
    );
}

#[test]
fn nonsense_on_the_control_socket() {
    let place = Place::new();
    let control = text(&place.path("control.sock"));
    let daemon = Daemon::serve(&place, &["--control", &control, "mem://1M"]);
    let noise = pattern(1, 100_000);
    for request in [
        &b"{\"method\":\"reboot\"}\n"[..],
        b"\n",
        b"[]\n",
        b"no JSON",
        &noise,
        b"",
    ] {
        let mut stream = UnixStream::connect(&control).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        // It may close before everything is written.
        let _ = stream.write_all(request);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!String::from_utf8_lossy(&answer).contains("controllers"));
    }
    assert_eq!(counters(&control)["resets"], 0);
    daemon.end();
}

/// The host rings by stores, and by a message only when EventIdx asks for it. Pauses of all lengths
/// around the idle window let the store meet the worker in every state: polling, arming, asleep. A
/// lost wake-up is a command without an end.
#[test]
fn shadow_doorbells_wake_a_sleeping_worker() {
    const COMMANDS: u64 = 3000;
    let place = Place::new();
    let control = text(&place.path("control.sock"));
    let daemon = Daemon::serve(
        &place,
        &["--control", &control, "--idle-window", "30", "mem://4M"],
    );
    for round in 0..2u64 {
        let mut host = Host::up(&place.socket());
        host.use_shadow_doorbells();
        let mut random = pattern(round, COMMANDS as usize).into_iter();
        for i in 0..COMMANDS {
            let data = pattern(i, 512);
            if i % 16 == 0 {
                host.write(1, i % 64, &data);
                assert!(host.read(1, i % 64, 512) == data);
            } else {
                host.flush(1);
            }
            match random.next().unwrap() {
                pause @ 0..100 => std::thread::sleep(Duration::from_micros(u64::from(pause))),
                100 => std::thread::sleep(Duration::from_millis(2)),
                _ => {}
            }
        }
        let queue = &counters(&control)["queues"][1];
        let [commands, mmio, shadow] = ["commands", "mmio_doorbells", "shadow_doorbells"]
            .map(|name| queue[name].as_u64().unwrap());
        assert!(commands >= COMMANDS && shadow > 0, "{queue}");
        assert!(mmio < 2 * commands, "every doorbell was a message: {queue}");
        // After a reset the old buffers mean nothing: doorbells are messages again.
        host.client.reset().unwrap();
        host.enable();
        host.create_queues(1, None);
        host.write(1, 0, &pattern(1, 512));
        assert!(host.shadow_pages_are_zero(), "old buffers were written");
    }
    daemon.end();
}

fn ask_for_stats(stream: &UnixStream) -> String {
    let mut stream = stream;
    stream.write_all(b"{\"method\":\"stats\"}\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Clients that say nothing, half a request, or a byte at a time, keep nobody from the counters.
#[test]
fn slow_clients_hold_up_no_other() {
    let place = Place::new();
    let control = text(&place.path("control.sock"));
    let args = [
        "--control",
        &control,
        "--client-connects",
        "100000",
        "mem://1M",
    ];
    let daemon = Daemon::serve(&place, &args);
    let connect = || {
        let stream = UnixStream::connect(&control).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    };
    // It answers: everything that it opens is open.
    assert!(ask_for_stats(&connect()).contains("controllers"));
    let before = descriptors(daemon.pid());
    let first = connect();
    let slow: Vec<UnixStream> = (0..20).map(|_| connect()).collect();
    for stream in &slow {
        (&*stream).write_all(b"{\"method\":").unwrap();
    }
    let start = std::time::Instant::now();
    for _ in 0..20 {
        assert!(ask_for_stats(&connect()).contains("controllers"));
    }
    // One after the other, each with its two seconds, they would take longer.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    // A thousand that say nothing: the oldest are dropped.
    for round in 0..1000 {
        let stream = connect();
        if round % 100 == 0 {
            assert!(ask_for_stats(&connect()).contains("controllers"));
        }
        drop(stream);
    }
    let many: Vec<UnixStream> = (0..200).map(|_| connect()).collect();
    assert!(ask_for_stats(&connect()).contains("controllers"));
    assert!(descriptors(daemon.pid()) <= before + 40);
    // Who takes longer than two seconds is dropped, whatever it sends meanwhile.
    assert_eq!((&first).read(&mut [0; 1]).unwrap(), 0);
    let late = connect();
    let mut bytes = b"{\"method\":\"stats\",          ".iter().cycle();
    eventually("it is dropped", || {
        std::thread::sleep(Duration::from_millis(50));
        let byte = [*bytes.next().unwrap()];
        (&late).write_all(&byte).is_err()
    });
    drop((slow, many));
    daemon.wait_descriptors(before);
    daemon.end();
}

#[test]
fn what_stands_in_the_control_sockets_place_at_the_end_is_left_alone() {
    let place = Place::new();
    let control = place.path("control.sock");
    let args = ["--control", &text(&control), "mem://1M"];
    for replaced in ["a file", "a directory", "a link"] {
        let daemon = Daemon::serve(&place, &args);
        std::fs::remove_file(&control).unwrap();
        std::fs::remove_file(place.socket()).unwrap();
        for path in [&control, &place.socket()] {
            match replaced {
                "a file" => std::fs::write(path, "precious").unwrap(),
                "a directory" => std::fs::create_dir(path).unwrap(),
                _ => std::os::unix::fs::symlink("/etc/passwd", path).unwrap(),
            }
        }
        daemon.end();
        for path in [&control, &place.socket()] {
            let left = std::fs::symlink_metadata(path).expect(replaced);
            match left.is_dir() {
                true => std::fs::remove_dir(path).unwrap(),
                false => std::fs::remove_file(path).unwrap(),
            }
        }
    }
}
