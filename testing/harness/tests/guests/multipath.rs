//! Two disks of one subsystem in one Linux guest, for one host: two paths to one namespace, which
//! native multipath combines. Their ANA states change under load.
//!
//! `VNVME_ANA_SECONDS` says for how long they change, once a second (20).

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, in_one_guest, run, run_for};
use crate::zones::ZonePaths;
use anyhow::{Result, ensure};
use harness::daemon::program;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};
use serde_json::Value;

/// One host has both disks.
const HOST: &str = "0123456789abcdef0123456789abcdef";
const ON: &str = "nvme_core.multipath=Y";

/// Shell functions. `path N`: the directory of the N-th controller's path to the namespace;
/// `reached N STATE`: the guest knows that state, soon.
const LIB: &str = r#"
path() { ls -d /sys/class/nvme/$(ctrl $1)/nvme*c*n*; }
reached() {
    for try in $(seq 100); do
        [ "$(cat $(path $1)/ana_state)" = $2 ] && return 0
        sleep 0.1
    done
    echo "controller $1 is $(cat $(path $1)/ana_state) to the guest, and not $2"
    exit 1
}
"#;

/// What each second brings, again and again: the states of both, one after the other. At its end
/// one of them can be used; in between there may be none.
const SECONDS: [[(&str, &str); 2]; 8] = [
    [("b", "optimized"), ("a", "inaccessible")],
    [("b", "inaccessible"), ("a", "optimized")],
    [("a", "change"), ("b", "non-optimized")],
    [("b", "persistent-loss"), ("a", "non-optimized")],
    [("a", "persistent-loss"), ("b", "optimized")],
    [("b", "change"), ("a", "optimized")],
    [("b", "non-optimized"), ("a", "non-optimized")],
    [("a", "optimized"), ("b", "optimized")],
];

struct Paths {
    disks: Disks,
}

impl Paths {
    fn new() -> Result<Paths> {
        let disks = Disks::new()?;
        let volume = disks.sparse("shared.raw", 64)?;
        let at = |name: &str| disks.dir().join(name);
        let mut config = format!(
            "[process]\nworkers = 2\ncontrol = {:?}\n",
            at("control").display().to_string()
        );
        for (name, cntlid) in [("a", 1), ("b", 2)] {
            config += &format!(
                "[[controller]]\nsocket = {:?}\nsubsystem = \"paths\"\ncntlid = {cntlid}\n\
                 host-id = \"{HOST}\"\n\
                 [[controller.namespace]]\nvolume = {volume:?}\nana-group = 3\n\
                 format-file = {:?}\n",
                at(name),
                at("format"),
            );
        }
        config += "ana-state = \"non-optimized\"\n";
        fs::write(at("vnvme.toml"), config)?;
        Ok(Paths { disks })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.disks.dir().join(name)
    }

    /// What `vnvme ana` says, after a change if there is to be one.
    fn ana(&self, words: &[&str]) -> Result<Value> {
        let mut command = Command::new(program()?);
        let command = command
            .arg("ana")
            .args(words)
            .arg("--json")
            .arg("--control");
        let output = command.arg(self.path("control")).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{words:?}: {said}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn set(&self, disk: &str, state: &str) -> Result<()> {
        let told = self.ana(&[disk, "--set", state])?;
        let told = &told[0];
        ensure!(told["state"] == state && told["disk"] == disk, "{told}");
        Ok(())
    }
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run(guest, &format!("{LIB}\n{text}"))
}

/// Two disks of two paths each, one of them zoned.
#[test]
fn paths_change_under_load() -> Result<()> {
    let seconds = seconds()?;
    let limit = LONG_TIMEOUT * 6 + Duration::from_secs(seconds);
    let builder = || Guest::builder("multipath").append(ON).limit(limit);
    in_one_guest(builder, [Multipath::serve(seconds)?, ZonePaths::serve()?])
}

fn seconds() -> Result<u64> {
    let seconds = std::env::var("VNVME_ANA_SECONDS");
    Ok(seconds.map_or(Ok(20), |said| said.parse())?)
}

struct Multipath {
    paths: Paths,
    daemon: Daemon,
    seconds: u64,
}

impl Multipath {
    fn serve(seconds: u64) -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            let name = "multipath::paths_change_under_load";
            skip(name, "QEMU's own controller has no ANA");
            return Ok(None);
        }
        let paths = Paths::new()?;
        let daemon = Daemon::builder("multipath");
        let daemon = daemon
            .config(&paths.path("vnvme.toml"), &paths.path("b"))
            .start()?;
        Ok(Some(Box::new(Multipath {
            paths,
            daemon,
            seconds,
        })))
    }
}

impl Part for Multipath {
    fn name(&self) -> &'static str {
        "multipath"
    }

    fn disks(&self) -> Vec<Disk> {
        let disk = |name| Disk::VfioUser {
            socket: self.paths.path(name),
        };
        ["a", "b"].map(disk).into()
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        let (paths, seconds) = (&self.paths, self.seconds);
        checks.check("two paths, one disk", || one_disk(paths, guest));
        checks.check("each state is the guest's", || states(paths, guest));
        checks.check("only the path that is left", || alone(paths, guest));
        checks.check("changes under fio", || load(paths, guest, seconds));
        checks.check("another block size", || formats(paths, guest));
        self.daemon.must_live()
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

fn one_disk(paths: &Paths, guest: &Guest) -> Result<()> {
    script(
        guest,
        "is() { [ \"$1\" = \"$2\" ] || { echo \"$3: $1, and not $2\"; exit 1; }; }
         field() { name=$1; shift; \"$@\" | sed -n \"s/^$name *: *//p\"; }
         is $(wait_disk 1 1) $(wait_disk 2 1) disks
         s=$(dirname /sys/class/nvme-subsystem/*/$(ctrl 1))
         is $(ls -d $s/nvme*n1 | wc -l) 1 'number of disks'
         is $(ls -d $s/nvme[0-9] | wc -l) 2 paths
         reached 1 optimized; reached 2 non-optimized
         is $(cat $(path 1)/ana_grpid) 3 ana_grpid
         c=/dev/$(ctrl 1)
         is $(field cmic nvme id-ctrl $c) 0xb cmic
         is $(($(field anacap nvme id-ctrl $c))) 31 anacap
         is $(($(field anagrpmax nvme id-ctrl $c))) 32 anagrpmax
         is $(($(field anagrpid nvme id-ns $(disk 1 1)))) 3 anagrpid
         nvme ana-log /dev/$(ctrl 2) >/tmp/log; grep -qi 'non-optimized' /tmp/log || { cat /tmp/log; exit 1; }
         nvme ana-log /dev/$(ctrl 2) --groups",
    )?;
    let told = paths.ana(&[])?;
    let states: Vec<_> = told.as_array().into_iter().flatten().collect();
    ensure!(states.len() == 2, "{told}");
    ensure!(
        states[1]["cntlid"] == 2 && states[1]["group"] == 3,
        "{told}"
    );
    ensure!(states[1]["state"] == "non-optimized", "{told}");
    Ok(())
}

fn states(paths: &Paths, guest: &Guest) -> Result<()> {
    for state in [
        "inaccessible",
        "persistent-loss",
        "change",
        "optimized",
        "non-optimized",
    ] {
        paths.set("b", state)?;
        script(guest, &format!("reached 2 {state}; reached 1 optimized"))?;
    }
    Ok(())
}

/// What the one writes the other reads, each of them alone.
fn alone(paths: &Paths, guest: &Guest) -> Result<()> {
    for (gone, left, number, byte) in [("a", "b", 2, "B"), ("b", "a", 1, "A")] {
        paths.set(left, "optimized")?;
        paths.set(gone, "inaccessible")?;
        // The driver may not have read the log page yet: then a command finds out.
        script(
            guest,
            &format!(
                "count() {{ nvme smart-log /dev/$(ctrl {number}) | grep host_write_commands | tr -dc 0-9; }}
                 d=$(disk 1 1); before=$(count)
                 head -c 4096 /dev/zero | tr '\\000' {byte} >/tmp/block
                 dd if=/tmp/block of=$d bs=4096 count=1 oflag=direct conv=notrunc
                 dd if=$d of=/tmp/read bs=4096 count=1 iflag=direct
                 cmp /tmp/block /tmp/read
                 [ $(count) -gt $before ]"
            ),
        )?;
    }
    Ok(())
}

/// One path formats, and both have the new blocks: each is used alone afterwards.
fn formats(paths: &Paths, guest: &Guest) -> Result<()> {
    for (path, format, size) in [(1, 1, 4096), (2, 0, 512)] {
        for disk in ["a", "b"] {
            paths.set(disk, "optimized")?;
        }
        script(
            guest,
            &format!(
                "d=$(disk 1 1); head -c 1048576 /dev/urandom >/tmp/data
                 dd if=/tmp/data of=$d bs=1M oflag=direct conv=notrunc
                 nvme format /dev/$(ctrl {path}) -n 1 --lbaf={format} --force
                 for try in $(seq 100); do
                     [ $(blockdev --getss $d) = {size} ] && break
                     sleep 0.1
                 done
                 [ $(blockdev --getss $d) = {size} ]
                 for n in 1 2; do
                     f=$(nvme id-ns /dev/$(ctrl $n) -n 1 | sed -n 's/^flbas *: *//p')
                     [ $((f)) = {format} ] || {{ echo path $n: FLBAS $f; exit 1; }}
                 done
                 [ $(dd if=$d bs=1M count=1 iflag=direct | tr -d '\\000' | wc -c) = 0 ]"
            ),
        )?;
        for (gone, left) in [("a", "b"), ("b", "a")] {
            paths.set(left, "optimized")?;
            paths.set(gone, "inaccessible")?;
            script(
                guest,
                "fio --name=one --filename=$(disk 1 1) --ioengine=io_uring --direct=1 \
                     --rw=randrw --bsrange=4k-64k --iodepth=16 --size=8m --verify=crc32c \
                     --verify_fatal=1 --verify_state_save=0 >/tmp/fio 2>&1 \
                     || { cat /tmp/fio; exit 1; }",
            )?;
        }
    }
    Ok(())
}

fn load(paths: &Paths, guest: &Guest, seconds: u64) -> Result<()> {
    script(
        guest,
        "d=$(wait_disk 1 1)
         (rounds=0; while [ ! -e /tmp/stop ]; do
             fio --name=paths --filename=$d --ioengine=io_uring --direct=1 --rw=randrw \
                 --bsrange=4k-128k --iodepth=16 --size=24m --numjobs=2 --offset_increment=32m \
                 --verify=crc32c --verify_fatal=1 --verify_state_save=0 --group_reporting \
                 >/tmp/fio 2>&1 || { echo failed >/tmp/end; exit; }
             rounds=$((rounds + 1)); echo $rounds >/tmp/rounds
         done; echo well >/tmp/end) </dev/null >/dev/null 2>&1 &",
    )?;
    let began = Instant::now();
    let mut changes = 0;
    for second in 0..seconds {
        for (disk, state) in SECONDS[second as usize % SECONDS.len()] {
            paths.set(disk, state)?;
            changes += 1;
        }
        let next = Duration::from_secs(second + 1);
        std::thread::sleep(next.saturating_sub(began.elapsed()));
    }
    let said = run_for(
        guest,
        LONG_TIMEOUT,
        &format!(
            "{LIB}\ntouch /tmp/stop
             for try in $(seq 1800); do [ -e /tmp/end ] && break; sleep 0.1; done
             [ \"$(cat /tmp/end)\" = well ] || {{ cat /tmp/fio; dmesg | tail -20; exit 1; }}
             [ $(dmesg | grep -c 'I/O error') = 0 ] || {{ dmesg | grep 'I/O error'; exit 1; }}
             [ $(dmesg | grep -ciE 'nvme.*(timeout|reset|removing)') = 0 ] || {{ dmesg | tail -20; exit 1; }}
             for n in 1 2; do nvme smart-log /dev/$(ctrl $n) | grep -E 'host_(read|write)_commands|num_err_log'; done
             echo rounds $(cat /tmp/rounds)"
        ),
    )?;
    eprintln!(
        "multipath: {changes} changes in {seconds} s: {}",
        said.trim().replace('\n', ", ")
    );
    // Both have done a good part of it.
    let counts: Vec<u64> = said
        .lines()
        .filter(|line| line.contains("commands"))
        .filter_map(|line| {
            line.split(':')
                .nth(1)?
                .split_whitespace()
                .next()?
                .replace(',', "")
                .parse()
                .ok()
        })
        .collect();
    ensure!(
        counts.len() == 4 && counts.iter().all(|count| *count > 100),
        "{said}"
    );
    Ok(())
}
