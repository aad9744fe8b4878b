//! The sandbox of the process, entered once everything is open: crate `sandbox`, with the rights
//! that the configuration needs.

pub(crate) mod descriptors;
pub mod inherited;
pub(crate) mod path_check;
pub mod receiver;
pub(crate) mod socket_maker;
pub(crate) mod sockets;
pub(crate) mod tcp;

use crate::confine::path_check::PathAnswers;
use crate::front::kind::front_end;
use crate::keep::KeeperSession;
use crate::manage::{allows_ublk, places, servers};
use crate::open::journals;
use crate::serve::options::ServeOptions;
use anyhow::{Context, Result};
use config::choices::SandboxMode;
use config::disk::DiskSpec;
use config::spec::Specs;
use config::volumes;
use remote::Address;
use sandbox::{Connect, Needs, Sandbox};
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, mpsc};
use std::thread::JoinHandle;

/// Directory in /proc with an entry for each thread of this process.
const THREADS: &str = "/proc/self/task";

/// Directory in sysfs that the sandbox permits for reading properties of devices.
const DEVICES: &str = "/sys/devices";

/// Proof that this process is outside of its sandbox. Only then can it open whatever its
/// configuration names, and start processes with its rights. [`serve`](crate::serve::serve) makes
/// the only one, which [`Confinement::enter`] takes:
///
/// ```
/// # use config::spec::Specs;
/// # use daemon::confine::{Confinement, Unconfined};
/// # use daemon::{keep::KeeperSession, serve::options::ServeOptions};
/// # type Open = fn(&Unconfined);
/// fn start(at: Unconfined, open: Open, of: (&Specs, &ServeOptions, &KeeperSession)) {
///     open(&at);
///     let _inside = Confinement::enter(at, of.0, of.1, &[], of.2);
/// }
/// ```
///
/// Nothing is opened so afterwards:
///
/// ```compile_fail,E0382
/// # use config::spec::Specs;
/// # use daemon::confine::{Confinement, Unconfined};
/// # use daemon::{keep::KeeperSession, serve::options::ServeOptions};
/// # type Open = fn(&Unconfined);
/// fn start(at: Unconfined, open: Open, of: (&Specs, &ServeOptions, &KeeperSession)) {
///     let _inside = Confinement::enter(at, of.0, of.1, &[], of.2);
///     open(&at);
/// }
/// ```
#[derive(Debug)]
pub struct Unconfined(());

impl Unconfined {
    /// Makes the proof, at the start of a process.
    pub(crate) fn at_start() -> Self {
        Self(())
    }
}

/// Proof that the sandbox is complete: clients may be served. Made by [`Confinement::seal`].
#[derive(Debug)]
pub struct Sealed(());

/// Sandbox that the process is in, if it has one. The sandbox is open for the threads that are
/// started until it is sealed.
pub struct Confinement {
    sandbox: Option<Sandbox>,
    /// Whether the process serves block devices (ublk), or may do so later.
    ublk: bool,
    /// Set when the sandbox is complete, so that clients may be served.
    sealed: OnceLock<()>,
}

impl Confinement {
    /// Enters the sandbox with the rights to serve the disks of `specs`, and to open the
    /// unavailable disks. The serving threads, which are started later, inherit it.
    ///
    /// # Errors
    /// The kernel refuses a part of the sandbox.
    pub fn enter(
        _outside: Unconfined,
        specs: &Specs,
        options: &ServeOptions,
        unavailable: &[DiskSpec],
        keeper: &KeeperSession,
    ) -> Result<Self> {
        let mut needs = needs(specs, options, keeper);
        let ublk = needs.ublk;
        let sandbox = match options.sandbox {
            SandboxMode::On => {
                for disk in unavailable {
                    to_open(disk, &options.answers, &mut needs);
                }
                if !needs.open_below.is_empty() || !unavailable.is_empty() {
                    // Journals of images that are opened later.
                    let folder = options.control.as_deref().map(journals::folder);
                    needs
                        .files_in
                        .extend(folder.filter(|folder| folder.is_dir()));
                }
                let sandbox = Sandbox::new(needs);
                let report = sandbox.enter()?;
                tracing::info!("sandbox: {report}");
                if let Some(missing) = report.missing() {
                    tracing::warn!("the sandbox leaves open: {missing}");
                }
                Some(sandbox)
            }
            SandboxMode::Off => {
                tracing::warn!(
                    "no sandbox (--sandbox off): an attacker in control of this process has all \
                     its rights"
                );
                None
            }
        };
        Ok(Self {
            sandbox,
            ublk,
            sealed: OnceLock::new(),
        })
    }

    /// Returns whether the process serves block devices (ublk), or may do so later.
    pub fn has_ublk(&self) -> bool {
        self.ublk
    }

    /// Seals the sandbox, when the workers have opened everything that they need. Releases the
    /// workers in any case; after a failure they end.
    ///
    /// # Errors
    /// The kernel refuses a part of the sandbox.
    pub fn seal(&self) -> Result<Sealed> {
        let sealed = self.sandbox.as_ref().map_or(Ok(()), Sandbox::seal);
        self.release();
        sealed?;
        Ok(Sealed(()))
    }

    /// Releases the threads that [`Confinement::wait`] holds.
    pub fn release(&self) {
        let _ = self.sealed.set(());
    }

    /// Waits until [`Confinement::seal`] has completed the sandbox. No client is served before.
    pub fn wait(&self) {
        self.sealed.wait();
    }
}

/// Starts a thread before everything is open; it needs nothing but open descriptors.
///
/// # Errors
/// There is no thread to be had, or it cannot give up the rest.
pub fn spawn_early(
    name: &str,
    mode: SandboxMode,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let (told, tell) = mpsc::channel();
    let builder = std::thread::Builder::new().name(name.into());
    let thread = builder.spawn(move || {
        let left = match mode {
            SandboxMode::On => sandbox::leave_nothing(),
            SandboxMode::Off => Ok(()),
        };
        let is_left = left.is_ok();
        let _ = told.send(left);
        if is_left {
            run();
        }
    });
    let thread = thread.with_context(|| format!("thread \"{name}\""))?;
    // Later there are no system calls for it.
    tell.recv().context("a thread ended by a bug")??;
    Ok(thread)
}

/// The folder that a configuration's file lies in, if it is one for this program, by its name:
/// /etc/vnvme, ~/.config/vnvme. Editors put another file into a file's place, and the right to read
/// the one does not go over to the other.
pub fn own_folder(config: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(config).ok()?;
    let folder = path.parent().filter(|_| path.is_file())?;
    (folder.file_name()? == "vnvme").then(|| folder.to_owned())
}

/// Returns the rights that a daemon needs to open files and servers while it runs.
fn later(options: &ServeOptions) -> Needs {
    let Some(daemon) = &options.daemon else {
        return Needs::default();
    };
    let mut open_below = places(options);
    open_below.retain(|place| !options.answers.is_unanswered(place));
    // The state is written anew beside the old one.
    let state = options.state.as_ref().and_then(|state| state.parent());
    open_below.extend(state.map(|folder| {
        if folder.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            folder.to_owned()
        }
    }));
    let mut read_below: Vec<PathBuf> = daemon.config.iter().cloned().collect();
    read_below.extend(daemon.config.as_deref().and_then(own_folder));
    if open_below.iter().any(|place| place.starts_with("/dev")) {
        // Properties of block devices in sysfs.
        read_below.push(DEVICES.into());
    }
    Needs {
        open_below,
        read_below,
        ..Needs::default()
    }
}

/// Adds the rights to open the volumes of an unavailable disk, and the files beside them, while the
/// process runs. The rights are for the folder, since another file may replace the present one. For
/// a device in /dev they are for that device alone, since the folder contains all devices. For a
/// file system that does not answer they are for the folder that contains its mount point: rights
/// cannot be given for a folder without asking its file system.
fn to_open(disk: &DiskSpec, answers: &PathAnswers, needs: &mut Needs) {
    needs.takes_over = true;
    let files = disk.files();
    // The target of a link is in another folder.
    let targets = files
        .iter()
        .filter_map(|path| answers.canonicalize(path).ok());
    let paths: Vec<PathBuf> = targets.chain(files.iter().cloned()).collect();
    for path in paths {
        let path = std::path::absolute(&path).unwrap_or(path);
        let in_dev = path.parent() == Some(Path::new("/dev"));
        let place = match path.parent() {
            Some(_) if answers.is_unanswered(&path) => match above_mount(&path) {
                Some(place) => place,
                None => continue,
            },
            Some(folder) if !in_dev => folder.to_owned(),
            _ => path,
        };
        let is_device = place.starts_with("/dev");
        if is_device
            && !needs
                .read_below
                .iter()
                .any(|below| below == Path::new(DEVICES))
        {
            // Properties of block devices.
            needs.read_below.push(DEVICES.into());
        }
        if !needs.open_below.contains(&place) {
            needs.open_below.push(place);
        }
    }
}

/// Returns the folder that contains the mount point of a path's file system, unless that is the
/// root. No file system is asked, and links are not followed.
fn above_mount(path: &Path) -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.map(|point| PathBuf::from(point.replace("\\040", " ")));
    let point = points
        .filter(|point| path.starts_with(point))
        .max_by_key(|point| point.components().count())?;
    let above = point.parent().filter(|above| above.parent().is_some());
    above.map(Path::to_owned)
}

/// Returns the permission to connect that a volume needs to reconnect to its server.
fn connection(server: Address) -> Connect {
    match server {
        Address::Tcp { port, .. } => Connect::Tcp(port),
        Address::Unix(path) => {
            let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
            Connect::UnixIn(directory.unwrap_or(Path::new(".")).to_owned())
        }
    }
}

/// Returns the servers to connect to, each once: those of volumes, those that may be added later,
/// and any server at the ports to which libraries connect.
fn connections(volumes: &[&str], ports: &[u16], options: &ServeOptions) -> Vec<Connect> {
    let later = options.daemon.as_ref().map(|_| servers(options));
    let of_volumes = volumes.iter().flat_map(|url| volumes::servers(url));
    let ports = ports.iter().copied().map(Connect::Tcp);
    let mut connect = Vec::new();
    let of_volumes = of_volumes.chain(later.unwrap_or_default());
    for to in of_volumes.map(connection).chain(ports) {
        if !connect.contains(&to) {
            connect.push(to);
        }
    }
    connect
}

fn needs(specs: &Specs, options: &ServeOptions, keeper: &KeeperSession) -> Needs {
    let volumes: Vec<&str> = specs.iter().flat_map(|disk| disk.volumes()).collect();
    let vfio = volumes.iter().any(|url| {
        let scheme = url.split_once("://");
        scheme.is_some_and(|(scheme, _)| scheme == driver::NVME.name)
    });
    let libraries = volumes.iter();
    let libraries = libraries.filter_map(|url| volumes::remote(url)?.library_ports(url));
    let libraries: Vec<Vec<u16>> = libraries.collect();
    let sockets = specs.iter().filter_map(|disk| disk.socket());
    let sockets = sockets.chain(options.control.as_deref());
    let mut remove_in: Vec<PathBuf> = sockets
        .filter_map(|socket| socket.parent().map(Path::to_owned))
        .collect();
    remove_in.sort();
    remove_in.dedup();
    let pools = specs.iter().filter_map(|disk| disk.pool());
    let pools = pools
        .filter(|pool| !options.answers.is_unanswered(pool))
        .map(Path::to_owned);
    let mut needs = Needs {
        remove_in,
        files_in: pools.collect(),
        // State of a worker's thread, for the watchdog's messages. Each thread opens its own files.
        read_in: vec![THREADS.into()],
        connect: connections(&volumes, &libraries.concat(), options),
        library: !libraries.is_empty(),
        lock_memory: options.polling.pin_memory || vfio,
        vfio,
        // Systemd gets an open file of each memory.
        reopen: keeper.is_systemd(),
        ublk: options.daemon.is_some() && allows_ublk(options),
        ..later(options)
    };
    for disk in DiskSpec::all(specs) {
        front_end(&disk).add_needs(&mut needs, keeper);
    }
    needs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::options::Daemon;

    fn always() -> Needs {
        Needs {
            read_in: vec![THREADS.into()],
            ..Needs::default()
        }
    }

    fn of(file: &str) -> Needs {
        let specs: Specs = toml::from_str(file).unwrap();
        let options = ServeOptions::new(specs.process.clone(), 1);
        needs(&specs, &options, &KeeperSession::default())
    }

    #[test]
    fn sandbox_needs_follow_configuration() {
        let file = "[[controller]]\nsocket = \"/run/a/s\"\n[[controller.namespace]]\n\
                    volume = \"disk.raw\"\n";
        let plain = Needs {
            remove_in: vec!["/run/a".into()],
            ..always()
        };
        assert_eq!(of(file), plain);
        let export = "[[vhost-user-blk]]\nsocket = \"s\"\nvolume = \"mem://1M\"\n";
        let process = "[process]\npin-memory = true\ncontrol = \"/run/a/c\"\n";
        let more = Needs {
            remove_in: vec!["".into(), "/run/a".into()],
            lock_memory: true,
            ..always()
        };
        assert_eq!(of(&format!("{file}{export}{process}")), more);
        let device = Needs {
            lock_memory: true,
            vfio: true,
            ..plain.clone()
        };
        assert_eq!(
            of(&file.replace("disk.raw", "nvme://0000:01:00.0/1")),
            device
        );
        // Where they are, and once, however many volumes are there.
        let server =
            "nbd://host:7/x?iops=5\"\n[[controller.namespace]]\nvolume = \"nbd://other:7/y";
        let unix = "nbd+unix:///x?socket=/run/n%62d/s&offset=1M";
        for (url, connect) in [
            (server, Connect::Tcp(7)),
            ("nbd://[::1]/x", Connect::Tcp(10809)),
            (unix, Connect::UnixIn("/run/nbd".into())),
            ("nbd+unix:///x?socket=s", Connect::UnixIn(".".into())),
            (
                "nvme+tcp://10.0.0.2,10.0.0.3/nqn.x/1?kato=9s",
                Connect::Tcp(4420),
            ),
        ] {
            let more = Needs {
                connect: vec![connect],
                ..plain.clone()
            };
            assert_eq!(of(&file.replace("disk.raw", url)), more, "{url}");
        }
        // Ceph's library calls more; its ports are in a configuration that is not there.
        let image = of(&file.replace("disk.raw", "rbd://pool/image?conf=/nonexistent"));
        let more = Needs {
            library: true,
            ..plain.clone()
        };
        assert_eq!(image, more);
        // A guest's own namespaces come and go.
        let pool = "socket = \"/run/a/s\"\npool = \"/srv/p\"\n";
        let pooled = of(&file.replace("socket = \"/run/a/s\"\n", pool));
        let more = Needs {
            files_in: vec!["/srv/p".into()],
            ..plain.clone()
        };
        assert_eq!(pooled, more);
        // Disks of a daemon may be on other servers later.
        let process = "[process]\nallow = [\"nbd://10.0.0.2/\", \"/run/x\"]\n";
        let specs: Specs = toml::from_str(&format!("{process}{file}")).unwrap();
        let mut options = ServeOptions::new(specs.process.clone(), 1);
        assert_eq!(needs(&specs, &options, &KeeperSession::default()), plain);
        options.daemon = Some(Daemon::default());
        let later = needs(&specs, &options, &KeeperSession::default());
        assert_eq!(later.connect, [Connect::Tcp(10809)]);
        assert_eq!(later.open_below, [PathBuf::from("/run/x")]);
        let disk = Needs {
            ublk: true,
            ..always()
        };
        assert_eq!(of("[[ublk]]\nvolume = \"disk.raw\"\n"), disk);
    }
}
