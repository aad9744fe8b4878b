//! Clients of every kind on one device, beside each other, each on its own slice, which it
//! verifies: two virtual NVMe controllers, one of them on the direct path and one that changes
//! between the paths, a vhost-user-blk export, a ublk disk; and among them a hostile guest.
//! Controllers and the device itself are reset, the device is suspended and resumed and grows,
//! limits and paths change. In the end the whole device is compared, from outside: no byte between
//! the slices has changed, and each holds what its client wrote. (The end of the slice off by a few
//! blocks in `mediate::Slice::lba` is found by the comparison, broken on purpose.)
//!
//! `VNVME_SOAK_SECONDS` is its duration.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{Disks, boot_with_device, json, run, run_for};
use anyhow::{Context, Result, anyhow, ensure};
use harness::daemon::{build, program};
use harness::process::Process;
use harness::progress::{say, skip};
use harness::served::Controller;
use harness::{Daemon, Guest};

const DEVICE: u64 = 48 << 20;

/// A slice, and what its client leaves about it.
struct Slice {
    name: &'static str,
    bytes: Range<u64>,
    /// Somebody hostile has it: it may hold anything.
    hostile: bool,
}

/// Slices with a block or a few between them, and the hostile one among them. The last one may have
/// all the rest up to `end`.
fn slices(end: Option<u64>) -> Vec<Slice> {
    let mut at = 1 << 20;
    let mut slice = |name, mib: u64, gap: u64, hostile| {
        let bytes = at..at + (mib << 20);
        at = bytes.end + gap;
        Slice {
            name,
            bytes,
            hostile,
        }
    };
    let mut slices = vec![
        slice("direct", 8, 512, false),
        slice("hostile", 4, 512, true),
        slice("switching", 8, 4096, false),
        slice("virtio", 8, 1536, false),
        slice("host", 8, 0, false),
    ];
    if let (Some(end), Some(last)) = (end, slices.last_mut()) {
        last.bytes.end = end;
    }
    slices
}

fn seconds(default: u64) -> u64 {
    let told = std::env::var("VNVME_SOAK_SECONDS").ok();
    told.and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// What the device holds where no slice is: 64-bit words that say where they are.
fn between(range: Range<u64>) -> Vec<u8> {
    let word = |at: u64| (at ^ 0x5a17_c0de_f00d_b10c).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    range
        .step_by(8)
        .flat_map(|at| word(at).to_le_bytes())
        .collect()
}

/// Compares all of the device with what its clients left and with what was between them.
fn compare(file: &Path, slices: &[Slice], images: &HashMap<&str, Vec<u8>>) -> Result<()> {
    let device = std::fs::read(file)?;
    let same = |what: &str, range: Range<u64>, wanted: &[u8]| -> Result<()> {
        let there = device
            .get(range.start as usize..range.end as usize)
            .unwrap_or_default();
        ensure!(there.len() == wanted.len(), "{what}: another size");
        let differs = there.iter().zip(wanted).position(|(a, b)| a != b);
        ensure!(
            differs.is_none(),
            "{what}: byte {} of the device is another",
            range.start + differs.unwrap_or(0) as u64
        );
        Ok(())
    };
    let mut end = 0;
    for slice in slices {
        let gap = end..slice.bytes.start;
        same(
            &format!("before {}", slice.name),
            gap.clone(),
            &between(gap),
        )?;
        end = slice.bytes.end;
        if !slice.hostile {
            let image = images.get(slice.name).context("no image")?;
            same(slice.name, slice.bytes.clone(), image)?;
        }
    }
    let rest = end..device.len() as u64;
    same("after all slices", rest.clone(), &between(rest))
}

/// The daemon's configuration, for a device with this URL and sockets in a directory. The
/// export's slice and the host's, which is a ublk disk, or else a controller that has all the
/// rest, have limits that can be set.
fn config(device: &str, dir: &str, ublk: bool) -> String {
    let mut text = String::new();
    for slice in slices(None) {
        let Range { start, end } = slice.bytes;
        let mut url = format!("{device}?offset={start}");
        if ublk || slice.name != "host" {
            url += &format!("&length={}", end - start);
        }
        let socket = format!("socket = \"{dir}/{}\"", slice.name);
        text += &match slice.name {
            "virtio" => {
                format!("[[vhost-user-blk]]\n{socket}\nqueues = 2\nvolume = \"{url}&iops=0\"\n")
            }
            "host" if ublk => format!("[[ublk]]\nid = 3\nqueues = 2\nvolume = \"{url}&iops=0\"\n"),
            _ => {
                format!("[[controller]]\n{socket}\n[[controller.namespace]]\nvolume = \"{url}\"\n")
            }
        };
    }
    text
}

/// What happens to the clients meanwhile, one after the other, until they have ended. `$b` is the
/// device, `$hostile` and `$limit` are seconds.
const TURNS: &str = r#"
export LD_LIBRARY_PATH=/tools/lib:/tmp
# Whatever ends this early: what the server and the kernel say of it, and what memory is left.
trap 'status=$?; [ $status = 0 ] || { tail -n 100 /tmp/log; dmesg | tail -n 40; free -m; df -m /tmp; }' EXIT
# What the server has to say that matters.
said() { grep -a -e WARN -e ERROR -e 'request failed' /tmp/log | tail -n 40; }
wait_for() { for try in $(seq 1200); do eval "$1" && return 0; sleep 0.05; done; echo "never: $1" >&2; return 1; }
# With each failed request in the log.
VNVME_LOG=info,ublk=debug /tmp/vnvme serve --config /tmp/all.toml --workers 2 --control /tmp/ctl >/tmp/log 2>&1 & daemon=$!
wait_for '[ -b /dev/ublkb3 ] && [ -S /tmp/virtio ] && [ -S /tmp/direct ] && [ -S /tmp/switching ] && [ -S /tmp/hostile ] || ! kill -0 $daemon'
kill -0 $daemon || { cat /tmp/log; exit 1; }
client() {
    { s=0; /tmp/soak "$@" >/tmp/$name.out 2>&1 || s=$?; echo $s >/tmp/$name.status; } &
}
name=direct client nvme /tmp/direct $seconds /tmp/direct.image
name=switching client nvme /tmp/switching $seconds /tmp/switching.image
name=virtio client virtio /tmp/virtio $seconds /tmp/virtio.image
name=host client block /dev/ublkb3 $seconds /tmp/host.image
# The first hostile guest is killed in the middle.
/tmp/soak hostile /tmp/hostile 1000 >/tmp/first.out 2>&1 & first=$!
second_hostile() {
    kill -9 $first; wait $first || true
    first=
    name=hostile client hostile /tmp/hostile $hostile
}
turn=0
# Limits of the disks on the generic path: limits of another one would move it there.
limit() {
    local d
    for d in virtio ublkb3; do
        /tmp/vnvme limits --control /tmp/ctl $d "$@" || return 1
    done
}
until [ -e /tmp/direct.status ] && [ -e /tmp/switching.status ] && [ -e /tmp/virtio.status ] && [ -e /tmp/host.status ]; do
    kill -0 $daemon || { cat /tmp/log; exit 1; }
    # A client that does not end: what is there to be said of it, while there is time to say it.
    [ $turn -gt $((seconds + 120)) ] && {
        said
        for name in direct switching virtio host hostile; do
            echo "--- $name: $(cat /tmp/$name.status 2>/dev/null || echo at work)"; cat /tmp/$name.out
        done
        /tmp/vnvme stats --control /tmp/ctl --json; tail -n 100 /tmp/log; exit 1
    }
    turn=$((turn + 1))
    case $((turn % 8)) in
    1 | 5) /tmp/vnvme path --control /tmp/ctl switching --set generic ;;
    3 | 7) /tmp/vnvme path --control /tmp/ctl switching --set direct ;;
    2) limit --iops 300 --bps 0 --burst 20ms ;;
    4) limit --iops 0 --bps 4M ;;
    6) limit --iops 0 --bps 0 ;;
    0) limit --write-iops 200 --read-iops 0 ;;
    esac >/tmp/turn 2>&1 || { cat /tmp/turn /tmp/log; exit 1; }
    [ $((turn % 8)) = 1 ] && limit --write-iops 0 >/dev/null
    [ $((turn % 10)) = 4 ] && { echo 1 >/sys/bus/pci/devices/$b/reset; echo "reset $turn"; }
    [ $((turn % 10)) = 8 ] && {
        /tmp/vnvme suspend --control /tmp/ctl $b >/dev/null; sleep 0.5
        [ $((turn % 20)) = 8 ] || echo 1 >/sys/bus/pci/devices/$b/reset
        /tmp/vnvme resume --control /tmp/ctl $b >/dev/null; echo "suspended and resumed $turn"
    }
    [ $turn = 10 ] && second_hostile
    sleep 1
done
# A turn takes as long as the machine lets it: on a busy one the clients end before the tenth.
[ -z "$first" ] || second_hostile
wait_for '[ -e /tmp/hostile.status ]'
for name in direct switching virtio host hostile; do
    [ "$(cat /tmp/$name.status)" = 0 ] || said
    echo "--- $name: $(cat /tmp/$name.status)"; cat /tmp/$name.out
    [ "$(cat /tmp/$name.status)" = 0 ] || failed=1
done
# A client that failed: what the server and the kernel say of it.
[ -z "$failed" ] || { /tmp/vnvme stats --control /tmp/ctl --json; tail -n 200 /tmp/log; dmesg | tail -n 40; }
echo "--- $turn turns"
"#;

/// Ends the daemon well.
const END: &str = r#"
daemon=$(pidof vnvme); kill -TERM $daemon
for try in $(seq 600); do kill -0 $daemon 2>/dev/null || break; sleep 0.1; done
kill -0 $daemon 2>/dev/null && { cat /tmp/log; exit 1; }
grep -i -e panic /tmp/log && exit 1
dmesg | grep -i -e 'DMAR.*fault' && exit 1
grep -i reset /tmp/log | head -20
"#;

fn clients(guest: &Guest, seconds: u64) -> Result<()> {
    let bdf = run(guest, "bdf 1")?.trim().to_string();
    run(
        guest,
        &format!("modprobe ublk_drv\nLD_LIBRARY_PATH=/tools/lib:/tmp /tmp/vnvme bind {bdf}"),
    )?;
    let config = config(&format!("nvme://{bdf}/1"), "/tmp", true);
    guest.push_file("/tmp/all.toml", 0o644, config.as_bytes())?;
    let limit = Duration::from_secs(seconds + 240);
    let hostile = seconds.saturating_sub(12).max(8);
    let text = run_for(
        guest,
        limit,
        &format!("b={bdf} seconds={seconds} hostile={hostile}\n{TURNS}"),
    )?;
    say(format!(
        "clients: {}",
        text.trim().replace('\n', "\nclients: ")
    ));
    for name in ["direct", "switching", "virtio", "host", "hostile"] {
        ensure!(text.contains(&format!("--- {name}: 0")), "{name} failed");
    }
    let stats = json(
        guest,
        "LD_LIBRARY_PATH=/tools/lib:/tmp /tmp/vnvme stats --control /tmp/ctl --json",
    )?;
    for (socket, refused) in [("direct", false), ("switching", false), ("hostile", true)] {
        let all = stats["controllers"].as_array().context("no controllers")?;
        let mine = all
            .iter()
            .find(|c| c["socket"].as_str().is_some_and(|s| s.ends_with(socket)));
        let paths = mine.map_or(&serde_json::Value::Null, |mine| &mine["direct"][0]);
        let lanes = paths["lanes"]
            .as_array()
            .with_context(|| format!("{socket}: {stats}"))?;
        let sum = |key: &str| {
            lanes
                .iter()
                .filter_map(|lane| lane[key].as_u64())
                .sum::<u64>()
        };
        say(format!(
            "clients: {socket}: {} direct commands, {} refused",
            sum("commands"),
            sum("refused")
        ));
        // How many depends on the machine: under other load a client gets through little in its
        // seconds.
        ensure!(
            sum("commands") > 0,
            "{socket} never took the direct path: {paths}"
        );
        ensure!((sum("refused") > 0) == refused, "{socket}: {paths}");
    }
    Ok(())
}

/// The device's file: zeroes, but between the slices.
fn device(disks: &Disks, slices: &[Slice]) -> Result<PathBuf> {
    let file = disks.sparse("disk.raw", DEVICE >> 20)?;
    let raw = File::options().write(true).open(&file)?;
    let mut end = 0;
    for slice in slices {
        raw.write_all_at(&between(end..slice.bytes.start), end)?;
        end = slice.bytes.end;
    }
    raw.write_all_at(&between(end..DEVICE), end)?;
    Ok(file)
}

#[test]
fn clients_cannot_reach_slices_of_others() -> Result<()> {
    let seconds = seconds(25);
    let disks = Disks::new()?;
    let slices = slices(None);
    let file = device(&disks, &slices)?;
    let programs = [program()?, build("soak", &["-p", "soak"])?];
    let guest = boot_with_device("clients", &file, None, &programs)?;
    clients(&guest, seconds)?;
    say(format!("clients: {}", run(&guest, END)?.trim()));
    let mut images = HashMap::new();
    for slice in slices.iter().filter(|slice| !slice.hostile) {
        let image = guest.pull_file(&format!("/tmp/{}.image", slice.name))?;
        images.insert(slice.name, image);
    }
    guest.poweroff()?;
    compare(&file, &slices, &images)
}

/// A program with its output in a file; it ends with this value.
struct Program(Process, PathBuf);

impl Program {
    fn start(name: &str, words: &[&str], dir: &Path) -> Result<Program> {
        let log = dir.join(format!("{name}.out"));
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let process = Process::start(name, &words, &[], &log, Duration::from_secs(900))?;
        Ok(Program(process, log))
    }

    fn finish(self, limit: Duration) -> Result<()> {
        let status = self.0.wait(limit)?;
        let text = std::fs::read_to_string(&self.1)?;
        say(format!(
            "clients: {}",
            text.trim().replace('\n', "\nclients: ")
        ));
        ensure!(status.success(), "{status}: {text}");
        Ok(())
    }
}

/// `vnvme` with these words.
fn control(words: &[&str]) -> Result<()> {
    let out = Command::new(program()?).args(words).output()?;
    let text = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{words:?}: {text}");
    Ok(())
}

/// The same with stock guests: two with Linux's NVMe driver and one with its virtio driver, each in
/// a machine of its own, on a device that is another vnvme's controller; beside them the userspace
/// driver and the hostile client.
#[test]
fn stock_guests_survive_hostile_neighbour() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("stock guests on one device", "it needs vnvme");
        return Ok(());
    }
    let seconds = seconds(15);
    let grown = DEVICE + (2 << 20);
    let disks = Disks::new()?;
    let file = device(&disks, &slices(Some(DEVICE)))?;
    let below = Daemon::builder("clients-below").volume(&file).start()?;
    let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
    let path = |name: &str| dir.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    let url = format!("vfio-user://{}/1", below.socket().display());
    std::fs::write(
        path("toml"),
        config(&url, &dir.path().display().to_string(), false),
    )?;
    let above = Daemon::builder("clients-above")
        .config(&path("toml"), &path("virtio"))
        .arg("--workers")
        .arg("2")
        .arg("--control")
        .arg(path("ctl"))
        .start()?;
    let soak = build("soak", &["-p", "soak"])?;
    let boot = |name: &str| -> Result<Guest> {
        let builder = Guest::builder(&format!("clients-{name}"))
            .cpus(2)
            .memory_mib(256)
            .programs(std::slice::from_ref(&soak));
        match name {
            "virtio" => builder
                .qemu_args(["-chardev", &format!("socket,id=v0,path={}", text(name))])
                .qemu_args([
                    "-device",
                    "vhost-user-blk-pci,id=disk0,chardev=v0,num-queues=2",
                ]),
            _ => builder.vfio_user(path(name)),
        }
        .boot()
    };
    let load = |name: &str| -> Result<Vec<u8>> {
        let guest = boot(name)?;
        let find = match name {
            "virtio" => {
                "d=; for s in /sys/block/vd*; do [ \"$(cat $s/size)\" = 16384 ] && d=/dev/${s##*/}; done; [ $d ]"
            }
            _ => "d=$(wait_disk 1 1); c=/dev/$(ctl 1)",
        };
        let reset = if name == "virtio" {
            "true"
        } else {
            "nvme reset $c"
        };
        let script = format!(
            "{}\nexport LD_LIBRARY_PATH=/tools/lib:/tmp\n/tmp/soak block $d {seconds} /tmp/image & load=$!\n\
             while sleep 2; kill -0 $load 2>/dev/null; do {reset} >/dev/null 2>&1 || exit 1; done\nwait $load",
            find.replace("ctl 1", "ctrl 1")
        );
        let out = run_for(&guest, Duration::from_secs(seconds + 240), &script)?;
        say(format!(
            "clients: {name}: {}",
            out.trim().replace('\n', ", ")
        ));
        let image = guest.pull_file("/tmp/image")?;
        guest.poweroff()?;
        Ok(image)
    };
    let program = soak.display().to_string();
    let time = (seconds + 25).to_string();
    let hostile = Program::start(
        "hostile",
        &[&program, "hostile", &text("hostile"), &time],
        dir.path(),
    )?;
    let driver = |time: &str| {
        let words = [&program, "nvme", &text("host"), time, &text("image")];
        Program::start("host", &words, dir.path())
    };
    let first = driver(&time)?;
    let mut images = std::thread::scope(|scope| -> Result<HashMap<&str, Vec<u8>>> {
        let guests =
            ["direct", "switching", "virtio"].map(|name| (name, scope.spawn(move || load(name))));
        let mut turn = 0;
        while guests.iter().any(|(_, guest)| !guest.is_finished()) {
            let ctl = text("ctl");
            let device = format!("vfio-user://{}", below.socket().display());
            // The other disks are on the direct path, which limits would move them from.
            let limit =
                |iops: &str| control(&["limits", "--control", &ctl, "virtio", "--iops", iops]);
            turn += 1;
            match turn % 5 {
                1 => control(&["path", "--control", &ctl, "switching", "--set", "generic"])?,
                2 => limit("400")?,
                3 => {
                    control(&["suspend", "--control", &ctl, &device])?;
                    std::thread::sleep(Duration::from_millis(300));
                    control(&["resume", "--control", &ctl, &device])?;
                }
                4 => control(&["path", "--control", &ctl, "switching", "--set", "direct"])?,
                _ => limit("0")?,
            }
            if turn == 15 {
                // The device grows under all of them, and the last slice with it.
                File::options().write(true).open(&file)?.set_len(grown)?;
            }
            std::thread::sleep(Duration::from_millis(700));
        }
        let images = guests.map(|(name, guest)| -> Result<_> {
            let image = guest.join().map_err(|_| anyhow!("a thread panicked"))?;
            Ok((name, image.with_context(|| name.to_string())?))
        });
        images.into_iter().collect()
    })?;
    let limit = Duration::from_secs(120);
    hostile.finish(limit)?;
    first.finish(limit)?;
    driver("2")?.finish(limit)?;
    images.insert("host", std::fs::read(path("image"))?);
    above.terminate()?;
    below.terminate()?;
    compare(&file, &slices(Some(grown)), &images)
}
