//! `make demo`: a virtual NVMe disk, end to end.
//!
//! A 1 GiB raw file is served by `vnvme serve`; a Linux guest makes a filesystem on it with its
//! stock driver, copies a tree of files and reads at random; then the host checks the raw file
//! itself. Every step must succeed.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use harness::cache::sha256_file;
use harness::image::Image;
use harness::progress::say;
use harness::qemu::{Accel, Qemu};
use harness::served::{Controller, Volumes};
use harness::{Cache, Guest};

const DISK_BYTES: u64 = 1 << 30;
const FIO_SECONDS: u32 = 3;

/// Text printed where QEMU translates the guest.
const OF_TCG: &str = "\
The figures above are not the disk's: KVM cannot run a guest on this machine, so QEMU translates the
guest's instructions (TCG), and nearly all of the time goes there. What the disk can do is measured
without a guest by
    target/release/vnvme bench disk.raw        what the volume can do
    make bench                                 everything, with a report in target/bench/report.html
and by this demo on a machine with KVM.";

/// Text printed at the end.
const NEXT: &str = "\
What to do next:
    truncate -s 20G disk.raw
    target/release/vnvme serve --socket /tmp/vm0.sock disk.raw
serves a disk for a VM of your own. Its QEMU (10.1 or newer) needs shared memory and the device, as
in the line above: -object memory-backend-memfd,share=on and -device vfio-user-pci. Then
    target/release/vnvme top                   what your disks do, live
    make package                               a Debian package with units for systemd
README.md goes on from here, docs/operations.md with libvirt, booting and many disks.";

fn main() {
    if let Err(e) = demo() {
        eprintln!("demo: failed: {e:#}");
        std::process::exit(1);
    }
}

/// The rows of the closing table.
#[derive(Default)]
struct Table(Vec<(String, String)>);

impl Table {
    fn row(&mut self, what: &str, result: String) {
        say(format!("{what}: {result}"));
        self.0.push((what.to_string(), result));
    }

    fn print(&self) {
        let width = self.0.iter().map(|(what, _)| what.len()).max().unwrap_or(0);
        println!();
        for (what, result) in &self.0 {
            println!("  {what:width$}  {result}");
        }
        println!();
    }
}

fn demo() -> Result<()> {
    let mut table = Table::default();
    let cache = Cache::open()?;
    say("demo: preparing the guest (packages are fetched the first time)");
    let image = Image::get(&cache)?;
    let dir = cache.scratch()?;
    let disk = dir.path().join("disk.raw");
    File::create(&disk)?.set_len(DISK_BYTES)?;
    say(format!("demo: serving {} (1 GiB)", disk.display()));
    let served = Volumes::file("demo", &disk).serve()?;
    if Controller::chosen()? == Controller::Qemu {
        table.row("controller", "QEMU's own, not vnvme".into());
    }
    say("demo: booting the guest");
    let guest = Guest::builder("demo").disk(served.disk()).boot()?;
    table.row("boot", format!("{:.1} s", guest.boot_seconds()));
    let command = guest.command().to_owned();
    println!("{}", guest.run("nvme list")?.trim_end());

    let started = Instant::now();
    guest.run("mkfs.ext4 -q /dev/nvme0n1 && mount -t ext4 /dev/nvme0n1 /mnt")?;
    table.row("mkfs.ext4, mount", seconds(started));
    let started = Instant::now();
    guest.run_for(
        Duration::from_secs(120),
        "cp -a /tools/share /mnt/share && umount /mnt",
    )?;
    let took = seconds(started);
    let wanted = guest.run_for(
        Duration::from_secs(120),
        "cd /tools/share && find . -type f -exec sha256sum {} +",
    )?;
    let wanted = parse_sums(&wanted)?;
    table.row("copy, umount", format!("{took} for {} files", wanted.len()));
    for depth in [1, 4, 32] {
        let (iops, micros) = random_read(&guest, depth)?;
        table.row(
            &format!("randread 4k, depth {depth}"),
            format!("{iops:.0} IOPS, {micros:.0} us mean"),
        );
    }
    say("demo: powering off");
    guest.poweroff()?;
    served.finish()?;
    check(&image, &disk, dir.path(), &wanted, &mut table)?;
    table.print();
    println!("QEMU was started by\n\n{command}\n");
    if Qemu::find(&cache)?.accel(&cache)? == Accel::Tcg {
        println!("{OF_TCG}\n");
    }
    println!("{NEXT}\n");
    println!("demo: ok");
    Ok(())
}

/// The host's own look at the raw file: filesystem and content.
fn check(
    image: &Image,
    disk: &Path,
    dir: &Path,
    wanted: &BTreeMap<PathBuf, String>,
    table: &mut Table,
) -> Result<()> {
    let disk = disk.display().to_string();
    image.tree.run("e2fsck", &["-f", "-n", &disk])?;
    table.row("host: e2fsck -fn", "clean".into());
    let copy = dir.join("copy");
    fs::create_dir(&copy)?;
    let request = format!("rdump /share {}", copy.display());
    // Run by an ordinary user, debugfs cannot give the files to their owners and prints a warning;
    // only the content matters.
    image.tree.run("debugfs", &["-R", &request, &disk])?;
    let mut found = BTreeMap::new();
    sums_of(&copy.join("share"), Path::new("."), &mut found)?;
    for (path, sum) in wanted {
        match found.get(path) {
            Some(other) if other == sum => {}
            Some(_) => bail!("{} on the disk differs from the guest's", path.display()),
            None => bail!("{} is not on the disk", path.display()),
        }
    }
    ensure!(
        found.len() == wanted.len(),
        "files on the disk that the guest did not copy"
    );
    table.row(
        "host: sha256 of files",
        format!("all {} agree with the guest's", found.len()),
    );
    Ok(())
}

/// Reads 4 KiB blocks at random with fio; answers IOPS and the mean latency in microseconds.
fn random_read(guest: &Guest, depth: u32) -> Result<(f64, f64)> {
    say(format!("demo: fio randread 4k, depth {depth}"));
    let json = guest.run(&format!(
        "fio --name=demo --filename=/dev/nvme0n1 --rw=randread --bs=4k --iodepth={depth} --ioengine=io_uring \
         --direct=1 --time_based --runtime={FIO_SECONDS} --output-format=json"
    ))?;
    let json = json.get(json.find('{').unwrap_or(0)..).unwrap_or_default();
    let report: serde_json::Value = serde_json::from_str(json).context("fio's report")?;
    let read = &report["jobs"][0]["read"];
    let number = |v: &serde_json::Value| v.as_f64().context("fio's report lacks a figure");
    let iops = number(&read["iops"])?;
    ensure!(iops > 0.0, "fio read nothing");
    Ok((iops, number(&read["clat_ns"]["mean"])? / 1000.0))
}

fn parse_sums(text: &str) -> Result<BTreeMap<PathBuf, String>> {
    let sums: Option<BTreeMap<PathBuf, String>> = text
        .lines()
        .map(|line| {
            let (sum, path) = line.split_once("  ")?;
            Some((PathBuf::from(path), sum.to_string()))
        })
        .collect();
    let sums = sums.context("sha256sum's output")?;
    ensure!(!sums.is_empty(), "there was nothing to copy");
    Ok(sums)
}

fn sums_of(root: &Path, below: &Path, into: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sums_of(root, &path, into)?;
        } else if kind.is_file() {
            into.insert(path.clone(), sha256_file(&root.join(&path))?);
        }
    }
    Ok(())
}

fn seconds(since: Instant) -> String {
    format!("{:.1} s", since.elapsed().as_secs_f32())
}
