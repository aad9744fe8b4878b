//! Use of an NVMe device's disks, or of a device that was given to userspace.
//!
//! Disks are those whose sysfs directories are below the device's, and, with native multipath, the
//! shared ones of its NVM subsystem. They are in use when they, or partitions of them, are mounted,
//! swapped to, held by another device (device mapper, md), or open.

use super::Host;
use anyhow::{Result, bail};
use driver::vfio::sysfs::{PciDevice, entries};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum number of processes that a message about a device in use names.
const NAMED: usize = 3;

/// Exclusive claim on the unused block devices of an NVMe device. Nobody can mount one until it is
/// dropped.
pub struct DeviceClaim {
    _claims: Vec<OwnedFd>,
}

/// Device node of the kernel: name in `/dev`, device number, and sysfs directory.
struct Node {
    name: String,
    /// Device number in the form `major:minor`, as in mountinfo.
    number: String,
    path: PathBuf,
}

impl DeviceClaim {
    /// Claims the block devices of an NVMe device. The error names their user in one line.
    pub fn of(host: &Host, device: &PciDevice) -> Result<DeviceClaim> {
        let below = directories(host, device);
        let disks = nodes(host, "block", &below);
        for check in [mounted, swapped, held] {
            if let Some(reason) = check(host, &disks) {
                bail!("{} is in use: {reason}", device.bdf);
            }
        }
        let mut open = disks;
        open.extend(nodes(host, "char", &below));
        let names: Vec<PathBuf> = open.iter().map(|node| host.dev.join(&node.name)).collect();
        let numbers: Vec<&str> = open.iter().map(|node| node.number.as_str()).collect();
        if let Some(reason) = opened(host, &names, &numbers) {
            bail!("{} is in use: {reason}", device.bdf);
        }
        let mut claims = Vec::new();
        // A claim on a disk excludes claims on its partitions, and the other way round.
        let whole = |node: &&Node| !node.path.join("partition").exists();
        for node in nodes(host, "block", &below).iter().filter(whole) {
            // Refused when the kernel itself holds the disk, or another mount namespace has mounted
            // it. A disk that cannot be opened for other reasons (hidden paths of a multipath disk
            // have no node) is not claimed.
            let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
            match rustix::fs::open(host.dev.join(&node.name), flags, Mode::empty()) {
                Ok(fd) => claims.push(fd),
                Err(Errno::BUSY) => {
                    let name = &node.name;
                    bail!("{} is in use: something holds /dev/{name}", device.bdf)
                }
                Err(_) => {}
            }
        }
        Ok(DeviceClaim { _claims: claims })
    }
}

/// Returns the user of the block device with this number (`major:minor`) or of one of its
/// partitions, from the system's own tables.
pub fn users(host: &Host, number: &str) -> Option<String> {
    let device = host.sysfs.path("dev/block").join(number);
    let disks = nodes(host, "block", &[device.canonicalize().ok()?]);
    let checks = [mounted, swapped, held];
    checks.into_iter().find_map(|check| check(host, &disks))
}

/// Returns an error that names the process, if one has the VFIO nodes of the device open.
pub fn vfio_users(host: &Host, device: &PciDevice) -> Result<()> {
    let vfio = host.dev.join("vfio");
    let group = device.group().map(|group| vfio.join(group.id.to_string()));
    let cdev = device.cdev().map(|name| vfio.join("devices").join(name));
    let names: Vec<PathBuf> = group.into_iter().chain(cdev).collect();
    let numbers: Vec<String> = names.iter().filter_map(|name| number(name)).collect();
    let numbers: Vec<&str> = numbers.iter().map(String::as_str).collect();
    match opened(host, &names, &numbers) {
        Some(reason) => bail!("{} is in use: {reason}", device.bdf),
        None => Ok(()),
    }
}

/// The directories below which a device's nodes are: its own, and those of the NVM subsystems of
/// its controllers.
fn directories(host: &Host, device: &PciDevice) -> Vec<PathBuf> {
    let controllers = entries(&device.path().join("nvme"));
    let subsystems = host.sysfs.path("class/nvme-subsystem");
    let shared = entries(&subsystems).into_iter().filter(|subsystem| {
        let has = |name: &String| subsystems.join(subsystem).join(name).exists();
        controllers.iter().any(has)
    });
    let mut found = vec![device.path().to_path_buf()];
    found.extend(shared.map(|subsystem| subsystems.join(subsystem)));
    let real = |path: &PathBuf| path.canonicalize().ok();
    found.iter().filter_map(real).collect()
}

/// Returns the device nodes of a kind (`block` or `char`) in these directories.
fn nodes(host: &Host, kind: &str, below: &[PathBuf]) -> Vec<Node> {
    let numbers = host.sysfs.path("dev").join(kind);
    let node = |number: String| {
        let path = numbers.join(&number).canonicalize().ok()?;
        let name = path.file_name()?.to_str()?.to_string();
        below
            .iter()
            .any(|dir| path.starts_with(dir))
            .then_some(Node { name, number, path })
    };
    let mut found: Vec<Node> = entries(&numbers).into_iter().filter_map(node).collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

fn mounted(host: &Host, disks: &[Node]) -> Option<String> {
    let table = fs::read_to_string(host.proc.join("self/mountinfo")).unwrap_or_default();
    table.lines().find_map(|line| {
        // "36 35 259:1 / /mnt rw,noatime master:1 - ext4 /dev/nvme0n1p1 rw"; some filesystems have
        // a number of their own, and only the source identifies the disk.
        let (front, back) = line.split_once(" - ")?;
        let mut fields = front.split(' ');
        let (number, point) = (fields.nth(2)?, fields.nth(1)?);
        let source = back.split(' ').nth(1)?;
        let is = |disk: &&Node| disk.number == number || source == format!("/dev/{}", disk.name);
        let disk = disks.iter().find(is)?;
        Some(format!("/dev/{} is mounted on {point}", disk.name))
    })
}

fn swapped(host: &Host, disks: &[Node]) -> Option<String> {
    let table = fs::read_to_string(host.proc.join("swaps")).unwrap_or_default();
    table.lines().skip(1).find_map(|line| {
        let name = line.split_whitespace().next()?.strip_prefix("/dev/")?;
        let disk = disks.iter().find(|disk| disk.name == name)?;
        Some(format!("/dev/{} is swapped to", disk.name))
    })
}

fn held(_: &Host, disks: &[Node]) -> Option<String> {
    disks.iter().find_map(|disk| {
        let holder = entries(&disk.path.join("holders")).into_iter().next()?;
        Some(format!("/dev/{} is part of /dev/{holder}", disk.name))
    })
}

/// The processes that have one of the nodes open, by name or by number. Processes of other users
/// may be invisible.
fn opened(host: &Host, names: &[PathBuf], numbers: &[&str]) -> Option<String> {
    let is = |entry: &Path| -> Option<PathBuf> {
        let target = fs::read_link(entry).ok()?;
        let by_number = || number(entry).is_some_and(|n| numbers.contains(&n.as_str()));
        (names.contains(&target) || by_number()).then_some(target)
    };
    let mut node = None;
    let mut users = Vec::new();
    for pid in entries(&host.proc) {
        if pid.parse::<u32>().is_err() || pid == std::process::id().to_string() {
            continue;
        }
        let dir = host.proc.join(&pid);
        let fds = dir.join("fd");
        let found = entries(&fds).iter().find_map(|fd| is(&fds.join(fd)));
        if let Some(target) = found {
            let name = fs::read_to_string(dir.join("comm")).unwrap_or_default();
            users.push(format!("process {pid} ({})", name.trim()));
            node.get_or_insert(target);
        }
        if users.len() == NAMED {
            break;
        }
    }
    Some(format!(
        "{} is open in {}",
        node?.display(),
        users.join(", ")
    ))
}

/// `major:minor` of a device node, also of one that a link of `/proc/PID/fd` leads to.
fn number(path: &Path) -> Option<String> {
    let meta = fs::metadata(path).ok()?;
    let number = meta.rdev();
    (number != 0).then(|| {
        format!(
            "{}:{}",
            rustix::fs::major(number),
            rustix::fs::minor(number)
        )
    })
}
