//! Two disks of one subsystem, each for a host of its own, in one Linux guest or in two:
//! reservations by nvme-cli, and what they do to reads and writes of the block layer.
//!
//! `VNVME_GUEST_FENCES` says how often two guests fence each other by nvme-cli (12), and
//! `VNVME_FENCES` how often a program in each does so without a pause (200).
//!
//! The process that is killed between a fence and the next start is in
//! `vnvme/tests/socket/subsystem.rs`, too.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::{Checks, Disks, Part, in_one_guest, json, run, run_for};
use crate::zones::ZoneHosts;
use anyhow::{Context, Result, ensure};
use harness::daemon::build;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};

/// The two disks are two to the guest, and not two paths to one.
const SEPARATE: &str = "nvme_core.multipath=N";

/// `$a` and `$b` are the disks.
const BOTH: &str = "a=$(wait_disk 1 1); b=$(wait_disk 2 1)";

/// Shell functions.
const LIB: &str = r#"
# `conflict COMMAND...`: it fails, and by a conflict. nvme-cli names the status (0x83, with "do not
# retry" 0x4083); the block layer makes EBADE of it.
conflict() {
    if said=$("$@" 2>&1); then echo "no conflict: $*: $said"; exit 1; fi
    case "$said" in
        *"Reservation Conflict"*|*"Invalid exchange"*) ;;
        *) echo "another error: $*: $said"; exit 1;;
    esac
}
# `store DISK BLOCK BYTE`, `load DISK BLOCK`: 4 KiB past the page cache.
store() {
    head -c 4096 /dev/zero | tr '\000' "$3" >/tmp/block
    dd if=/tmp/block of=$1 bs=4096 count=1 seek=$2 oflag=direct conv=notrunc
}
load() { dd if=$1 bs=4096 count=1 skip=$2 iflag=direct; }
# `holds DISK BLOCK BYTE`: that is all there is.
holds() {
    load $1 $2 2>/dev/null >/tmp/read
    [ $(wc -c </tmp/read) = 4096 ] && [ $(tr -d "$3" </tmp/read | wc -c) = 0 ] && return 0
    echo "$1 has something else than $3 in block $2"
    exit 1
}
"#;

/// A shared disk, its configuration, and where its reservations are kept.
struct SharedDisk {
    disks: Disks,
}

impl SharedDisk {
    fn new() -> Result<SharedDisk> {
        SharedDisk::with("")
    }

    /// Each with these options of its volume.
    fn with(options: &str) -> Result<SharedDisk> {
        let disks = Disks::new()?;
        let volume = disks.sparse("shared.raw", 64)?;
        let at = |name: &str| disks.dir().join(name);
        let mut config = String::from("[process]\nworkers = 2\n");
        for (name, cntlid) in [("a", 1), ("b", 2)] {
            config += &format!(
                "[[controller]]\nsocket = {:?}\nsubsystem = \"cluster\"\ncntlid = {cntlid}\n\
                 [[controller.namespace]]\nvolume = {{ url = {volume:?}{options} }}\n\
                 reservations = {:?}\n",
                at(name),
                at("reservations"),
            );
        }
        fs::write(at("vnvme.toml"), config)?;
        Ok(SharedDisk { disks })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.disks.dir().join(name)
    }

    fn serve(&self) -> Result<Daemon> {
        let daemon = Daemon::builder("reservations");
        daemon
            .config(&self.path("vnvme.toml"), &self.path("b"))
            .start()
    }

    fn both(&self) -> [Disk; 2] {
        ["a", "b"].map(|name| Disk::VfioUser {
            socket: self.path(name),
        })
    }

    fn boot(&self) -> Result<Guest> {
        let guest = Guest::builder("reservations").append(SEPARATE);
        let [a, b] = self.both();
        guest.disk(a).disk(b).boot()
    }
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run(guest, &format!("{BOTH}\n{LIB}\n{text}"))
}

#[test]
fn host_fences_other_by_nvme_cli() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        let name = "reservations::host_fences_other_by_nvme_cli";
        skip(name, "QEMU's own controller has no reservations");
        return Ok(());
    }
    let shared = SharedDisk::new()?;
    let daemon = shared.serve()?;
    let guest = shared.boot()?;
    let mut checks = Checks::new("reservations");
    checks.check("one namespace of two controllers", || one_namespace(&guest));
    checks.check("register, acquire, report", || acquires(&guest));
    checks.check("preempt and abort fences", || fences(&guest));
    checks.check("release", || releases(&guest));
    checks.check("the daemon is killed under a fence", || survives(&guest));
    // What they have lost is the guest's only disk of this kind: it is not shut down in order.
    guest.kill()?;
    daemon.kill()?;
    drop(daemon);
    let after = AfterKill {
        daemon: shared.serve()?,
        shared,
    };
    // The second guest has two zoned disks besides, which are another subject.
    let builder = || Guest::builder("reservations").append(SEPARATE);
    let outlasted: Option<Box<dyn Part>> = Some(Box::new(after));
    in_one_guest(builder, [outlasted, ZoneHosts::serve()?])?;
    checks.finish();
    Ok(())
}

/// The shared disk in the guest after the one that was killed.
struct AfterKill {
    daemon: Daemon,
    shared: SharedDisk,
}

impl Part for AfterKill {
    fn name(&self) -> &'static str {
        "reservations"
    }

    fn disks(&self) -> Vec<Disk> {
        self.shared.both().into()
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("the fence outlasts both", || outlasted(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

fn one_namespace(guest: &Guest) -> Result<()> {
    script(
        guest,
        "[ $a != $b ]
         nvme id-ns $a | grep -q '^nmic *: 0x1$'; nvme id-ns $a | grep -q '^rescap *: 0xff$'
         nvme id-ctrl $a | grep -q '^cntlid *: 0x1$'; nvme id-ctrl $b | grep -q '^cntlid *: 0x2$'
         [ $(nvme list-ctrl $a | grep -c ']:0x') = 2 ]
         store $a 1 A; holds $b 1 A; store $b 1 B; holds $a 1 B",
    )?;
    Ok(())
}

fn acquires(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme resv-register $a --nrkey=0xa --rrega=0 --cptpl=3
         nvme resv-register $b --nrkey=0xb --rrega=0
         store $a 2 A; store $b 2 B
         # A key that is not its own.
         conflict nvme resv-acquire $b --crkey=0xa --rtype=1 --racqa=0
         nvme resv-acquire $b --crkey=0xb --rtype=1 --racqa=0
         store $b 2 C; holds $a 2 C; conflict store $a 2 A; holds $a 2 C
         conflict nvme resv-acquire $a --crkey=0xa --rtype=1 --racqa=0",
    )?;
    let report = json(
        guest,
        &format!("{BOTH}\n{LIB}\nnvme resv-report $a --eds -o json"),
    )?;
    let number = |name: &str| report[name].as_u64();
    ensure!(
        number("gen") == Some(2) && number("rtype") == Some(1) && number("regctl") == Some(2),
        "{report}"
    );
    ensure!(number("ptpls") == Some(1), "{report}");
    let all = report["regctlext"].as_array().into_iter().flatten();
    let mut holders: Vec<_> = all
        .map(|one| {
            (
                one["cntlid"].as_u64(),
                one["rcsts"].as_u64(),
                one["rkey"].as_u64(),
            )
        })
        .collect();
    holders.sort_unstable();
    let expected = [(Some(1), Some(0), Some(0xa)), (Some(2), Some(1), Some(0xb))];
    ensure!(holders == expected, "{report}");
    Ok(())
}

fn fences(guest: &Guest) -> Result<()> {
    let said = script(
        guest,
        "nvme resv-acquire $a --crkey=0xa --prkey=0xb --rtype=1 --racqa=2
         store $a 3 A; holds $b 3 A
         conflict store $b 3 B; conflict nvme flush $b -n 1
         conflict nvme write-zeroes $b -n 1 -s 24 -c 7
         conflict nvme resv-acquire $b --crkey=0xb --rtype=1 --racqa=0
         holds $a 3 A
         nvme resv-notif-log $b",
    )?;
    ensure!(said.to_lowercase().contains("notif"), "{said}");
    Ok(())
}

fn releases(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme resv-release $a --crkey=0xa --rtype=1 --rrela=0
         store $b 4 B; holds $a 4 B
         # Exclusive access: reads, too.
         nvme resv-acquire $a --crkey=0xa --rtype=2 --racqa=0
         conflict store $b 4 C; conflict load $b 4; holds $a 4 B
         nvme resv-release $a --crkey=0xa --rrela=1
         store $b 4 C; holds $a 4 C
         nvme resv-report $a --eds -o json | tr -d ' \\n' | grep -q '\"regctl\":0,'",
    )?;
    Ok(())
}

fn survives(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme resv-register $a --nrkey=0xa --rrega=0 --cptpl=3
         nvme resv-acquire $a --crkey=0xa --rtype=1 --racqa=0
         conflict store $b 5 B; store $a 5 A",
    )?;
    Ok(())
}

fn outlasted(guest: &Guest) -> Result<()> {
    script(
        guest,
        "conflict store $b 5 B; holds $b 5 A
         store $a 5 B; holds $b 5 B
         nvme resv-report $b --eds -o json | tr -d ' \\n' | grep -q '\"regctl\":1,'
         nvme resv-release $a --crkey=0xa --rrela=1
         store $b 5 C; holds $a 5 C",
    )?;
    Ok(())
}

/// A daemon with a shared disk, and two guests that have it, each as another host.
struct Two {
    daemon: Daemon,
    guests: [Guest; 2],
}

impl Two {
    fn boot(shared: &SharedDisk, name: &str, limit: Duration) -> Result<Two> {
        let daemon = Daemon::builder(name).limit(limit);
        let daemon = daemon
            .config(&shared.path("vnvme.toml"), &shared.path("b"))
            .start()?;
        let programs = [build("soak", &["-p", "soak"])?];
        let boot = |disk: &str| {
            let guest = Guest::builder(&format!("{name}-{disk}"))
                .cpus(1)
                .programs(&programs);
            guest.limit(limit).vfio_user(shared.path(disk)).boot()
        };
        let guests = [boot("a")?, boot("b")?];
        Ok(Two { daemon, guests })
    }

    fn end(self) -> Result<()> {
        self.daemon.must_live()?;
        for guest in self.guests {
            guest.poweroff()?;
        }
        self.daemon.terminate()
    }
}

#[test]
fn guests_fence_each_other() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        let name = "reservations::guests_fence_each_other";
        skip(name, "QEMU's own controller has no reservations");
        return Ok(());
    }
    let fences = |name, default| {
        let fences = std::env::var(name);
        fences.map_or(Ok(default), |said| said.parse::<u64>())
    };
    let (slow, fast) = (
        fences("VNVME_GUEST_FENCES", 12)?,
        fences("VNVME_FENCES", 200)?,
    );
    // A dozen by nvme-cli takes a minute.
    let limit = Duration::from_secs(1200 + slow * 15 + fast);
    // So writes wait: some are in flight at each fence.
    let shared = SharedDisk::with(", write-iops = 1000")?;
    let two = Two::boot(&shared, "fencing", limit)?;
    let mut checks = Checks::new("fences");
    // On a disk of zeroes.
    checks.check("without a pause", || by_program(&two, fast, limit));
    checks.check("by nvme-cli", || by_nvme_cli(&two, slow));
    checks.check("power off and SIGTERM", || two.end());
    checks.finish();
    Ok(())
}

/// Each fences the other in turn, which writes all the time. From the end of that command on
/// nothing of the other one reaches the disk.
fn by_nvme_cli(two: &Two, fences: u64) -> Result<()> {
    let guests = &two.guests;
    let began = Instant::now();
    let mut written = 0;
    for turn in 0..fences {
        let at = (turn % 2) as usize;
        let (fencing, fenced) = (&guests[at], &guests[1 - at]);
        written += fence(fencing, fenced, turn)
            .with_context(|| format!("fence {turn} of {fences}, by guest {at}"))?;
    }
    let seconds = began.elapsed().as_secs();
    eprintln!("reservations: {fences} fences in {seconds} s, over {written} writes: ok");
    Ok(())
}

/// Fences by a program in each guest (`soak fence`), which knows the other one by its reads: writes
/// of the one that is fenced are outstanding in that very moment.
fn by_program(two: &Two, fences: u64, limit: Duration) -> Result<()> {
    let began = Instant::now();
    let said = std::thread::scope(|scope| -> Result<String> {
        let hosts = [0, 1].map(|host| {
            let guest = &two.guests[host];
            scope.spawn(move || {
                let script = format!(
                    "export LD_LIBRARY_PATH=/tools/lib:/tmp
                     /tmp/soak fence $(wait_disk 1 1) {host} {}",
                    fences + 1
                );
                run_for(guest, limit, &script)
            })
        });
        let mut said = String::new();
        for host in hosts {
            said += &host.join().unwrap()?;
        }
        Ok(said)
    })?;
    let seconds = began.elapsed().as_secs();
    eprintln!(
        "reservations: in {seconds} s: {}",
        said.trim().replace('\n', ", ")
    );
    let all: u64 = said
        .lines()
        .filter_map(|line| line.split(' ').nth(2)?.parse::<u64>().ok())
        .sum();
    ensure!(all == fences, "{said}");
    Ok(())
}

/// One fences the other. The writes that the other one had done by then.
fn fence(fencing: &Guest, fenced: &Guest, turn: u64) -> Result<u64> {
    let one = |guest: &Guest, text: &str| run(guest, &format!("d=$(wait_disk 1 1)\n{LIB}\n{text}"));
    let (key, victim) = (turn * 2 + 1, turn * 2 + 2);
    one(
        fenced,
        &format!(
            "rm -f /tmp/ended /tmp/count
             nvme resv-register $d --nrkey={victim} --rrega=0
             nvme resv-acquire $d --crkey={victim} --rtype=1 --racqa=0
             (count=0
              while store $d 1 V 2>/tmp/why; do count=$((count + 1)); echo $count >/tmp/count; done
              echo yes >/tmp/ended) </dev/null >/dev/null 2>&1 &
             for try in $(seq 100); do [ -s /tmp/count ] && exit 0; sleep 0.1; done
             echo it does not write; exit 1"
        ),
    )?;
    one(
        fencing,
        &format!(
            "nvme resv-register $d --nrkey={key} --rrega=0
             conflict store $d 2 F
             nvme resv-acquire $d --crkey={key} --prkey={victim} --rtype=1 --racqa=2
             store $d 1 F; holds $d 1 F"
        ),
    )?;
    let count = one(
        fenced,
        "for try in $(seq 100); do [ -e /tmp/ended ] && break; sleep 0.1; done
         grep -q 'Invalid exchange' /tmp/why
         holds $d 1 F
         conflict store $d 1 V; conflict nvme write-zeroes $d -n 1 -s 8 -c 7; conflict nvme flush $d -n 1
         holds $d 1 F
         cat /tmp/count",
    )?;
    one(
        fencing,
        &format!("holds $d 1 F; store $d 1 G; nvme resv-release $d --crkey={key} --rrela=1"),
    )?;
    let count = count.lines().last().unwrap_or_default().trim().parse();
    count.context("what it has written")
}
