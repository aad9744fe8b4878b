//! Opening of volumes, block devices, and sockets before anything is served.
//!
//! Everything is opened before the serving threads start: those begin inside the sandbox
//! (`crate::confine`), where nothing can be opened any more.

use crate::confine::socket_maker::SocketMaker;
use crate::confine::{Unconfined, path_check, tcp};
use crate::front;
use crate::front::ublk::OpenDisk;
use crate::keep::{
    Attempt, Identity, InitialDescriptors, KeeperSession, KeptSocket, LeftSocket, PreviousDisk,
    Survival,
};
use crate::manage::Source;
use crate::open::host_keys;
use crate::open::pools::DiskPool;
use crate::open::{OpenedVolume, Opener, subsystems};
use crate::parts::vhost_blk;
use crate::record::{self, Guest, Open as OpenNamespace, Shown};
use crate::serve::options::ServeOptions;
use crate::serve::shutdown::{self, NotDurable};
use crate::serve::signals::StopSignal;
use crate::serve::worker_context;
use anyhow::{Context, Result, anyhow};
use config::access::SocketAccess;
use config::disk::DiskSpec;
use config::origin::Origin;
use config::spec::{ControllerSpec, NamespaceSpec, NvmeTcpSpec, Specs, VhostBlkSpec};
use controller::{BootImage, ControllerConfig, DoorbellPage, MAX_BOOT_IMAGE, Subsystem};
use fabrics_target::HostKey;
use receive::{Intake, Receiver};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use state_memory::Layout;
use std::fs::OpenOptions;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use vfio_user::{Journal, Listener};
use volume::{Kind, Volume};

/// Volume of a namespace that is open, or that its worker opens.
pub struct Prepared {
    spec: NamespaceSpec,
    /// Name of the disk, and NSID of the namespace.
    of: (String, u32),
    /// `None`: the volume is opened by the thread that serves it, and only the volume below it is
    /// open ([`Opener::open_below`]).
    opened: Option<OpenedVolume>,
}

impl Prepared {
    fn new(spec: NamespaceSpec, (disk, nsid): (String, u32), opener: &Opener) -> Result<Self> {
        let opened = if opener.open_below(&spec, &disk, nsid)? {
            None
        } else {
            Some(opener.open(&spec, &disk, nsid)?)
        };
        let of = (disk, nsid);
        Ok(Self { spec, of, opened })
    }

    fn opened(spec: NamespaceSpec, of: (String, u32), opened: OpenedVolume) -> Self {
        let opened = Some(opened);
        Self { spec, of, opened }
    }

    /// Returns whether the volume's queues use the io_uring of their worker.
    pub fn needs_ring(&self) -> bool {
        let own = self
            .opened
            .as_ref()
            .filter(|opened| opened.device.is_none());
        let kind = own.map(|opened| opened.volume.info().kind);
        matches!(kind, Some(Kind::File | Kind::BlockDevice))
    }

    /// Returns a weak reference to the volume, if it is open.
    pub fn volume(&self) -> Option<Weak<dyn Volume>> {
        self.opened
            .as_ref()
            .map(|opened| Arc::downgrade(&opened.volume))
    }

    /// Returns the namespace with its volume, for the disk's record.
    fn recorded(&self) -> OpenNamespace<'_> {
        let opened = self.opened.as_ref();
        OpenNamespace {
            nsid: self.of.1,
            spec: &self.spec,
            volume: opened.map(|opened| &*opened.volume),
            block_size: opened.map_or(self.spec.block_size, |opened| opened.block_size),
        }
    }

    /// Returns whether requests that the previous process has sent to the volume have ended when
    /// this process has opened it.
    fn outlives_its_process(&self) -> bool {
        let is_remote = fabrics::portals(&self.spec.volume).is_some();
        let opened = self.opened.as_ref();
        opened.is_some_and(|opened| opened.device.is_none() && !is_remote)
    }

    /// Opens the volume on the thread that serves it, or returns the open one.
    pub fn open(self, opener: &Opener) -> Result<OpenedVolume> {
        let (disk, nsid) = &self.of;
        self.opened
            .map_or_else(|| opener.open(&self.spec, disk, *nsid), Ok)
    }
}

/// Controller with open volumes, before its socket is created.
pub struct ReadyController {
    spec: ControllerSpec,
    volumes: Vec<Prepared>,
    /// Subsystem of the controller.
    subsystem: Option<Arc<Subsystem>>,
    /// Reason why the disk ends with its process; `None` if it does not.
    ends: Option<&'static str>,
    /// Pool of the namespaces that the guest makes.
    pool: Option<Arc<DiskPool>>,
    boot: Option<BootImage>,
    shown: Shown,
}

impl ReadyController {
    /// Opens the volumes of a controller, and records the disk.
    pub fn new(spec: &ControllerSpec, opener: &Opener) -> Result<Self> {
        let name = spec.any_name();
        let guest = opener.keeper.client_of(&Identity::of(spec));
        opener.records.begin(&name, guest.clone());
        // A namespace of a subsystem is opened under the subsystem's name.
        opener.records.begin(&subsystems::memory_owner(spec), guest);
        let subsystem = opener.subsystems.of(spec, &opener.keeper);
        let volumes = spec.namespaces.iter().zip(1..).map(|(namespace, place)| {
            let nsid = namespace.nsid.unwrap_or(place);
            let of = (spec.any_name(), nsid);
            let opened = match &subsystem {
                Some(subsystem) => subsystems::open(opener, subsystem, spec, namespace, nsid)
                    .map(|opened| Prepared::opened(namespace.clone(), of, opened)),
                None => Prepared::new(namespace.clone(), of, opener),
            };
            namespace.origin.place("volume", opened)
        });
        let volumes: Vec<Prepared> = volumes.collect::<Result<_>>()?;
        let (pool, boot) = (opener.open_pool(spec)?, boot_image(spec)?);
        let files = [
            ("pool", &spec.pool),
            ("boot-partition", &spec.boot_partition),
        ];
        let files = files.into_iter();
        let shown = opener.records.settle(&record::OpenDisk {
            name: &name,
            kind: "controller",
            subsystem: spec.subsystem.as_deref(),
            serial: spec.serial.as_deref(),
            subnqn: spec.subnqn.as_deref(),
            files: files
                .filter_map(|(key, path)| Some((key, path.clone()?)))
                .collect(),
            namespaces: volumes.iter().map(Prepared::recorded).collect(),
        })?;
        let ends = if volumes.iter().all(Prepared::outlives_its_process) {
            opener.subsystems.ends_with_process(spec)
        } else {
            Some("it has a namespace on a controller")
        };
        Ok(Self {
            volumes,
            pool,
            boot,
            shown,
            ends,
            spec: spec.clone(),
            subsystem,
        })
    }

    /// Makes the controller's socket: a client may connect, and waits until it is served. `workers`
    /// is the number of workers among which the disk gets one.
    pub fn listen(self, context: &ListenContext<'_>, workers: usize) -> Result<OpenController> {
        let Self {
            spec,
            volumes,
            subsystem,
            ends,
            pool,
            boot,
            shown,
        } = self;
        let identity = Identity::of(&spec);
        let keeper = &context.opener.keeper;
        let left = keeper.left_of(&identity);
        let kept = left.as_ref().and_then(PreviousDisk::listener);
        let listener = context.bind(&spec.socket, &spec.access, &spec.origin, kept)?;
        let mut intake = front::intake(context.receiver);
        intake.connect(listener.as_fd()).context("receiver")?;
        let layout = || Layout {
            session: vfio_user::SESSION,
            ..controller::state_layout(&ControllerConfig {
                workers: u16::try_from(workers).unwrap_or(u16::MAX),
                ..worker_context::controller_config(&spec, String::new())
            })
        };
        let (page, survival) = match ends {
            None => survive(keeper, &identity, left, layout, &listener)?,
            Some(why) => {
                end_with_process(keeper, &identity, left, why);
                (DoorbellPage::new()?, None)
            }
        };
        Ok(OpenController {
            listener,
            intake,
            page,
            survival,
            resized: event()?,
            spec,
            volumes,
            subsystem,
            pool,
            boot,
            shown,
        })
    }
}

/// Reads the content of the disk's Boot Partitions, if it has any.
pub fn boot_image(spec: &ControllerSpec) -> Result<Option<BootImage>> {
    let read = |path: &PathBuf| {
        let what = || format!("boot partition {}", path.display());
        // A pipe would keep everybody waiting.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .with_context(what)?;
        if !file.metadata().with_context(what)?.is_file() {
            return Err(anyhow!("{} is not a regular file", what()));
        }
        let mut bytes = Vec::new();
        let limit = MAX_BOOT_IMAGE as u64 + 1;
        file.take(limit)
            .read_to_end(&mut bytes)
            .with_context(what)?;
        BootImage::new(&bytes).with_context(what)
    };
    let read = spec.boot_partition.as_ref().map(read).transpose();
    spec.origin.place("boot-partition", read)
}

/// A controller with an open socket and open volumes. Contains all that would delay other disks if
/// its worker had to make it.
pub struct OpenController {
    pub spec: ControllerSpec,
    pub listener: Listener,
    /// Connection to the receiver process, which receives descriptors from clients.
    pub intake: Intake,
    pub page: DoorbellPage,
    /// State of the disk that survives this process; `None` without a keeper.
    pub survival: Option<Survival>,
    /// Volumes of the controller, one for each namespace.
    pub volumes: Vec<Prepared>,
    /// Subsystem that the controller belongs to, if any.
    pub subsystem: Option<Arc<Subsystem>>,
    /// Pool in which the guest creates namespaces, if any.
    pub pool: Option<Arc<DiskPool>>,
    /// Content of the Boot Partitions, if configured.
    pub boot: Option<BootImage>,
    /// Identifiers of the disk and its namespaces as the host sees them.
    pub shown: Shown,
    /// Eventfd that becomes readable when a volume was resized.
    pub resized: Arc<OwnedFd>,
}

impl OpenController {
    /// Returns weak references to the volumes, by their NSIDs.
    pub fn volumes(&self) -> Vec<(u32, Weak<dyn Volume>)> {
        by_nsid(&self.spec.namespaces, &self.volumes)
    }
}

/// vhost-user-blk export with an open volume, before its socket is created.
pub struct ReadyExport {
    spec: VhostBlkSpec,
    volume: Prepared,
    span: tracing::Span,
    shown: Shown,
}

impl ReadyExport {
    /// Opens the volume of an export, and records the disk.
    pub fn new(spec: &VhostBlkSpec, opener: &Opener) -> Result<Self> {
        let span = tracing::error_span!("export", socket = %spec.socket.display());
        let entered = span.clone().entered();
        let name = spec.any_name();
        // A front-end that had the export connects again: nobody else knows whether there is one.
        let guest = Guest {
            is_attached: opener.keeper.is_successor()
                && opener.keeper.export_listens_at(&spec.socket),
            shown: None,
        };
        opener.records.begin(&name, guest);
        let volume = Prepared::new(spec.namespace(), (name.clone(), 1), opener);
        let volume = spec.origin.place("volume", volume)?;
        let shown = opener.records.settle(&record::OpenDisk {
            name: &name,
            kind: "vhost-user-blk",
            subsystem: None,
            serial: spec.serial.as_deref(),
            subnqn: None,
            files: Vec::new(),
            namespaces: vec![volume.recorded()],
        })?;
        drop(entered);
        Ok(Self {
            spec: spec.clone(),
            volume,
            span,
            shown,
        })
    }

    /// Makes its socket, as that of a controller.
    pub fn listen(self, context: &ListenContext<'_>) -> Result<OpenExport> {
        let Self {
            spec,
            volume,
            span,
            shown,
        } = self;
        let keeper = &context.opener.keeper;
        let left = keeper.left_socket(&spec.socket);
        let kept = left.as_ref().and_then(LeftSocket::listener);
        let listener = context.bind(&spec.socket, &spec.access, &spec.origin, kept)?;
        let kept = KeptSocket::new(keeper, &listener, left);
        if keeper.is_kept() && fabrics::portals(&spec.volume).is_some() {
            let volume = spec.volume.to_string();
            tracing::warn!(
                volume,
                "should this process be killed, what it was sending may arrive later than what the \
                 next one sends"
            );
        }
        let socket = listener.as_fd().try_clone_to_owned().context("socket")?;
        let mut intake = vhost_blk::intake(context.receiver);
        intake.connect(socket.as_fd()).context("receiver")?;
        Ok(OpenExport {
            kept,
            listener,
            socket,
            intake,
            resized: event()?,
            spec,
            volume,
            span,
            shown,
        })
    }
}

/// A vhost-user-blk export with an open socket and an open volume.
pub struct OpenExport {
    pub spec: VhostBlkSpec,
    /// Registration of the listening socket with the keeper, as long as the export is served.
    pub kept: Option<KeptSocket>,
    /// Listening socket. Dropping it removes the socket's file.
    pub listener: Listener,
    /// Duplicate of the listening socket's descriptor.
    pub socket: OwnedFd,
    /// Connection to the receiver process, which receives descriptors from clients.
    pub intake: Intake,
    pub volume: Prepared,
    /// Eventfd that becomes readable when the volume was resized.
    pub resized: Arc<OwnedFd>,
    /// Span that names the export in log messages.
    pub span: tracing::Span,
    /// Identifiers of the disk as the guest sees them.
    pub shown: Shown,
}

impl OpenExport {
    /// Returns a weak reference to the volume, under the NSID 1.
    pub fn volumes(&self) -> Vec<(u32, Weak<dyn Volume>)> {
        let volume = self.volume.volume().map(|volume| (1, volume));
        volume.into_iter().collect()
    }
}

/// NVMe/TCP subsystem with open volumes, before its socket is created.
pub struct ReadyTarget {
    spec: NvmeTcpSpec,
    keys: Vec<HostKey>,
    volumes: Vec<Prepared>,
    shown: Shown,
}

impl ReadyTarget {
    /// Opens the volumes of a subsystem, and records the disk.
    pub fn new(spec: &NvmeTcpSpec, opener: &Opener) -> Result<Self> {
        let name = spec.any_name();
        // Hosts connect to the next process again.
        let guest = Guest {
            is_attached: opener.keeper.is_successor(),
            shown: None,
        };
        opener.records.begin(&name, guest);
        let keys = spec.host_keys.as_deref().map(host_keys::read).transpose();
        let keys = keys.map(Option::unwrap_or_default);
        let volumes = spec.namespaces.iter().zip(1..).map(|(namespace, place)| {
            let of = (spec.any_name(), namespace.nsid.unwrap_or(place));
            let opened = Prepared::new(namespace.clone(), of, opener);
            namespace.origin.place("volume", opened)
        });
        let volumes: Vec<Prepared> = volumes.collect::<Result<_>>()?;
        let keys = spec.origin.place("host-keys", keys)?;
        let shown = opener.records.settle(&record::OpenDisk {
            name: &name,
            kind: "nvme-tcp",
            subsystem: None,
            serial: spec.serial.as_deref(),
            subnqn: spec.subnqn.as_deref(),
            files: Vec::new(),
            namespaces: volumes.iter().map(Prepared::recorded).collect(),
        })?;
        Ok(Self {
            volumes,
            keys,
            shown,
            spec: spec.clone(),
        })
    }

    /// Creates the listening socket of the subsystem.
    pub fn listen(self, context: &ListenContext<'_>) -> Result<OpenTarget> {
        let Self {
            spec,
            keys,
            volumes,
            shown,
        } = self;
        let listener = match context.opener.idle.take_tcp(spec.listen()) {
            Some(listener) => listener,
            None => spec.origin.place("listen", listen_at(spec.listen()))?,
        };
        Ok(OpenTarget {
            listener,
            resized: event()?,
            keys,
            spec,
            volumes,
            shown,
        })
    }
}

/// NVMe/TCP subsystem with open volumes and a listening socket.
pub struct OpenTarget {
    pub spec: NvmeTcpSpec,
    /// Secrets with which hosts authenticate.
    pub keys: Vec<HostKey>,
    pub listener: TcpListener,
    /// Volumes of the subsystem, one for each namespace.
    pub volumes: Vec<Prepared>,
    /// Eventfd that becomes readable when a volume was resized.
    pub resized: Arc<OwnedFd>,
    /// Identifiers of the subsystem and its namespaces as hosts see them.
    pub shown: Shown,
}

impl OpenTarget {
    /// Returns weak references to the volumes, by their NSIDs.
    pub fn volumes(&self) -> Vec<(u32, Weak<dyn Volume>)> {
        by_nsid(&self.spec.namespaces, &self.volumes)
    }
}

fn by_nsid(namespaces: &[NamespaceSpec], volumes: &[Prepared]) -> Vec<(u32, Weak<dyn Volume>)> {
    let volumes = namespaces.iter().zip(1..).zip(volumes);
    let volumes = volumes
        .filter_map(|((ns, place), volume)| Some((ns.nsid.unwrap_or(place), volume.volume()?)));
    volumes.collect()
}

pub fn listen_at(address: SocketAddr) -> Result<TcpListener> {
    let listener = tcp::listen(address).with_context(|| address.to_string())?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn event() -> Result<Arc<OwnedFd>> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(Arc::new(eventfd(0, flags).context("eventfd")?))
}

/// Returns a controller's doorbell page and kept state. Continues from the state of a previous
/// process if its controller has a client.
fn survive(
    keeper: &Arc<KeeperSession>,
    identity: &Identity,
    left: Option<PreviousDisk>,
    layout: impl Fn() -> Layout,
    listener: &Listener,
) -> Result<(DoorbellPage, Option<Survival>)> {
    let Some(mut keeper_client) = keeper.client() else {
        return Ok((DoorbellPage::new()?, None));
    };
    let mut before = None;
    if let Some(left) = left {
        match Journal::client_in(&left.state.session()) {
            Some(_) => match Survival::resume(keeper, left, identity, layout()) {
                Ok((survival, Some(page))) => {
                    let page = DoorbellPage::from_fd(page)?;
                    return Ok((page, Some(survival)));
                }
                Ok((survival, None)) => {
                    let left = survival.left.into_iter();
                    left.for_each(|left| left.discard(&mut keeper_client, "its page was not kept"));
                }
                Err(refused) => {
                    let (left, why) = *refused;
                    left.discard(&mut keeper_client, &format!("{why:#}"));
                }
            },
            // A client that has not sent anything yet finds the same disk as before.
            None => before = Some(left),
        }
    }
    let page = DoorbellPage::new()?;
    let first = InitialDescriptors {
        page: Some(page.as_fd()),
        listener,
        client: before.as_mut().and_then(PreviousDisk::take_client),
    };
    let made = Survival::new(keeper, identity, layout(), first);
    // Not before the client is kept as the new one's.
    if let Some(before) = before {
        before.discard(&mut keeper_client, "it was about to be accepted");
    }
    match made {
        Ok(survival) => Ok((page, Some(survival))),
        Err(error) => {
            let (disk, error) = (&identity.name, format_args!("{error:#}"));
            tracing::error!(disk, error, "this disk will not outlive its process");
            Ok((page, None))
        }
    }
}

/// Gives up the kept state of a disk, including the state that a previous process has left.
fn end_with_process(
    keeper: &KeeperSession,
    identity: &Identity,
    left: Option<PreviousDisk>,
    why: &str,
) {
    let Some(mut keeper_client) = keeper.client() else {
        return;
    };
    let disk = &identity.name;
    tracing::warn!(disk, "this disk will not outlive its process: {why}");
    if let Some(left) = left {
        left.discard(&mut keeper_client, why);
    }
}

/// Means of making the sockets of disks.
#[derive(Clone, Copy)]
pub struct ListenContext<'a> {
    /// Default access control.
    pub usual: &'a SocketAccess,
    pub receiver: &'a Receiver,
    /// Maker of sockets for other users, in the sandbox.
    pub maker: Option<&'a SocketMaker>,
    pub opener: &'a Opener,
}

impl ListenContext<'_> {
    /// Listens at a path: with the socket that a service manager has opened, or with `kept`, which
    /// a previous process has listened with, or else with a new one. In the sandbox `maker` makes
    /// one for other users.
    pub fn bind(
        &self,
        socket: &Path,
        access: &SocketAccess,
        origin: &Origin,
        kept: Option<(OwnedFd, u64)>,
    ) -> Result<Listener> {
        let Opener { keeper, idle, .. } = self.opener;
        let access = &access.or(self.usual);
        if access.is_open_to_all() {
            let socket = socket.display();
            tracing::warn!(%socket, "every user of this machine may connect (socket-mode)");
        }
        let inherited = origin.place("socket", keeper.inherited.listener(socket, access))?;
        if let Some(listener) = inherited.or_else(|| idle.take(socket)) {
            return Ok(listener);
        }
        if let Some((kept, inode)) = kept {
            match Listener::kept(kept, socket, inode) {
                Ok(listener) => return Ok(listener.owned_if(keeper.owns_sockets())),
                Err(error) => {
                    let socket = socket.display();
                    tracing::warn!(%socket, %error, "a kept socket cannot be used");
                }
            }
        }
        let listener = match self.maker {
            Some(maker) if !access.is_usual() => maker.listen(socket, access).map_err(Into::into),
            _ => access
                .resolve()
                .and_then(|access| Ok(Listener::bind_for(socket, &access)?)),
        };
        origin.place("socket", listener)
    }
}

/// Sees to it that a socket can be made, before volumes are opened for it: a process that serves it
/// already has the volumes, too, and is the better explanation.
pub fn make_room(socket: &Path, origin: &Origin, opener: &Opener) -> Result<()> {
    let Opener { keeper, idle, .. } = opener;
    if keeper.inherited.is_there(socket) || keeper.listens_at(socket) || idle.is_held(socket) {
        return Ok(());
    }
    let free = Listener::make_room(socket).map_err(Into::into);
    origin.place("socket", free)
}

/// Disks that one worker serves when the process starts.
#[derive(Default)]
pub struct Load {
    pub controllers: Vec<OpenController>,
    pub exports: Vec<OpenExport>,
    pub targets: Vec<OpenTarget>,
}

impl Load {
    /// Returns whether any queue of these disks uses an io_uring.
    pub fn needs_rings(&self) -> bool {
        let volumes = self.controllers.iter().flat_map(|open| &open.volumes);
        let exported = self.exports.iter().map(|open| &open.volume);
        let mut pools = self.controllers.iter().map(|open| &open.pool);
        volumes.chain(exported).any(Prepared::needs_ring) || pools.any(Option::is_some)
    }
}

/// A disk that cannot be served now.
pub struct UnavailableDisk {
    pub disk: DiskSpec,
    /// Reason why the disk cannot be served, as a text.
    pub why: String,
    /// Time since when the disk's files have not answered, if that is the reason.
    pub since: Option<Instant>,
}

impl UnavailableDisk {
    /// Creates the entry of an unavailable disk, and logs the error.
    pub fn new(disk: DiskSpec, error: &anyhow::Error) -> Self {
        let (name, why) = (disk.name(), format!("{error:#}"));
        tracing::error!(disk = name, "the disk is unavailable: {why}");
        let since = None;
        Self { disk, why, since }
    }

    /// Creates the entry of a disk whose files have not answered since then, and logs that.
    fn hanging(disk: DiskSpec, since: Instant) -> Self {
        let error = anyhow!(path_check::opening_for(since.elapsed()));
        Self {
            since: Some(since),
            ..Self::new(disk, &error)
        }
    }
}

/// All disks that the process serves at the start, with open volumes and sockets.
pub struct Open {
    /// Disks of each worker: controllers, exports and subsystems in turn.
    pub loads: Vec<Load>,
    pub disks: Vec<OpenDisk>,
    pub unserved: Vec<UnavailableDisk>,
}

/// Disks that have been opened so far, in the order of the specification. No client can connect
/// yet.
#[derive(Default)]
struct Opening {
    controllers: Vec<ReadyController>,
    exports: Vec<ReadyExport>,
    targets: Vec<ReadyTarget>,
    disks: Vec<OpenDisk>,
    unserved: Vec<UnavailableDisk>,
}

/// Opens all volumes; each is in `all` once it is open. Disks of the configuration come first, so
/// that no added disk is in the place of one.
fn open(
    specs: &Specs,
    opener: &Opener,
    options: &ServeOptions,
    all: &Mutex<Opening>,
) -> Result<()> {
    opener.subsystems.expect(specs);
    let disks = DiskSpec::all(specs).into_iter();
    let is_added = |disk: &DiskSpec| options.source(&disk.name()) == Source::Runtime;
    let (added, configured): (Vec<_>, Vec<_>) = disks.partition(is_added);
    for disk in configured.into_iter().chain(added) {
        let name = disk.name();
        if let Some(since) = options.answers.hanging_since(&name) {
            let unserved = UnavailableDisk::hanging(disk, since);
            all.lock().unpoisoned().unserved.push(unserved);
            continue;
        }
        if options.may_be_unavailable(&name)
            && let Some(why) = opener.keeper.deaths_of(&name)
        {
            let unserved = UnavailableDisk::new(disk, &anyhow!(why));
            all.lock().unpoisoned().unserved.push(unserved);
            continue;
        }
        let _attempt = Attempt::part(&opener.keeper, &name);
        let room = if options.may_be_left_out(&name) {
            make_room_for(&disk, opener)
        } else {
            Ok(())
        };
        match room.and_then(|()| open_disk(&disk, opener, all)) {
            Ok(()) => {}
            Err(error) if options.may_be_unavailable(&name) => {
                let unserved = UnavailableDisk::new(disk, &error);
                all.lock().unpoisoned().unserved.push(unserved);
            }
            Err(error) => return Err(options.not_served(&name, error)),
        }
    }
    Ok(())
}

/// Makes sure that the sockets can be made, for all disks that must not be left out. Called before
/// anything is opened: an ending process that has the same sockets has the volumes, too.
///
/// # Errors
/// A process that serves such a socket does not end.
pub fn make_room_for_all(specs: &Specs, opener: &Opener, options: &ServeOptions) -> Result<()> {
    let disks = DiskSpec::all(specs).into_iter();
    let mut needed = disks.filter(|disk| !options.may_be_left_out(&disk.name()));
    needed.try_for_each(|disk| {
        let room = make_room_for(&disk, opener);
        room.map_err(|error| options.not_served(&disk.name(), error))
    })
}

fn make_room_for(disk: &DiskSpec, opener: &Opener) -> Result<()> {
    let socket = disk.socket();
    socket.map_or(Ok(()), |socket| make_room(socket, disk.origin(), opener))
}

fn open_disk(disk: &DiskSpec, opener: &Opener, all: &Mutex<Opening>) -> Result<()> {
    match disk {
        DiskSpec::Controller(spec) => {
            let ready = ReadyController::new(spec, opener)?;
            all.lock().unpoisoned().controllers.push(ready);
        }
        DiskSpec::VhostBlk(spec) => {
            let ready = ReadyExport::new(spec, opener)?;
            all.lock().unpoisoned().exports.push(ready);
        }
        DiskSpec::NvmeTcp(spec) => {
            let ready = ReadyTarget::new(spec, opener)?;
            all.lock().unpoisoned().targets.push(ready);
        }
        DiskSpec::Ublk(spec) => {
            let disk = spec.origin.place("volume", OpenDisk::new(spec, opener))?;
            all.lock().unpoisoned().disks.push(disk);
        }
    }
    Ok(())
}

/// Makes the sockets, now that there is nothing left that a client would wait for, or that could
/// take its disk away from it again.
fn listen(
    workers: usize,
    context: &ListenContext<'_>,
    options: &ServeOptions,
    opening: Opening,
) -> Result<Open> {
    let mut loads = Vec::new();
    loads.resize_with(workers, Load::default);
    let mut turns = (0..workers).cycle();
    let mut unserved = opening.unserved;
    // Access control is set now: the sandbox lets no file change its owner.
    for disk in unserved.iter().map(|unserved| &unserved.disk) {
        if let Err(error) = context.opener.idle.hold(disk, context)
            && !options.may_be_left_out(&disk.name())
        {
            return Err(error);
        }
    }
    let mut leave_out = |disk: DiskSpec, error: anyhow::Error| {
        let name = disk.name();
        if options.may_be_left_out(&name) {
            unserved.push(UnavailableDisk::new(disk, &error));
            Ok(())
        } else {
            Err(options.not_served(&name, error))
        }
    };
    for ready in opening.controllers {
        let spec = DiskSpec::Controller(ready.spec.clone());
        let open = match ready.listen(context, workers) {
            Ok(open) => open,
            Err(error) => {
                leave_out(spec, error)?;
                continue;
            }
        };
        if let Some(load) = turns.next().and_then(|turn| loads.get_mut(turn)) {
            load.controllers.push(open);
        }
    }
    for ready in opening.exports {
        let spec = DiskSpec::VhostBlk(ready.spec.clone());
        let open = match ready.listen(context) {
            Ok(open) => open,
            Err(error) => {
                leave_out(spec, error)?;
                continue;
            }
        };
        if let Some(load) = turns.next().and_then(|turn| loads.get_mut(turn)) {
            load.exports.push(open);
        }
    }
    for ready in opening.targets {
        let spec = DiskSpec::NvmeTcp(ready.spec.clone());
        let open = match ready.listen(context) {
            Ok(open) => open,
            Err(error) => {
                leave_out(spec, error)?;
                continue;
            }
        };
        if let Some(load) = turns.next().and_then(|turn| loads.get_mut(turn)) {
            load.targets.push(open);
        }
    }
    Ok(Open {
        loads,
        disks: opening.disks,
        unserved,
    })
}

/// Interval of checks for the order to end while disks are being opened.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Opens everything, the volumes on a thread of their own: a file that is being opened may hang,
/// which is not to keep the process from ending. And the kernel executes some requests (ublk's) in
/// threads that belong to the one that submits, have its rights, and end with it: none of them is
/// left when the sandbox is entered.
///
/// Where it has not ended within the stop timeout after the order to end, the process ends, after
/// `clean_up`.
pub fn open_all(
    _outside: &Unconfined,
    specs: &Specs,
    workers: usize,
    context: &ListenContext<'_>,
    options: &ServeOptions,
    stop: &StopSignal,
    mut clean_up: impl FnMut(),
) -> Result<Open> {
    let limit = options.polling.stop_timeout;
    let all = Mutex::<Opening>::default();
    let (told, opened) = channel();
    std::thread::scope(|scope| {
        let open = || told.send(open(specs, context.opener, options, &all));
        let builder = std::thread::Builder::new().name("open".into());
        let thread = builder.spawn_scoped(scope, open);
        let thread = thread.context("thread \"open\"")?;
        let mut ordered = None;
        let opened = loop {
            match opened.recv_timeout(CHECK_INTERVAL) {
                Ok(opened) => break opened,
                Err(RecvTimeoutError::Timeout) if !stop.is_ordered() => {}
                Err(RecvTimeoutError::Timeout) => {
                    if ordered.get_or_insert_with(Instant::now).elapsed() >= limit {
                        // The scope would wait for the thread. Open files are free for other
                        // processes before the kernel has ended this one.
                        clean_up();
                        let mut all = all.lock().unpoisoned();
                        all.controllers.clear();
                        all.exports.clear();
                        all.targets.clear();
                        drop(all);
                        let what = "not all disks were open";
                        shutdown::exit(&NotDurable(format!("ended by force: {what}")));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break Err(anyhow!("it ended by a bug")),
            }
        };
        // The kernel's threads that work for this thread end with it.
        let _ = thread.join();
        opened
    })?;
    let opening = all.into_inner().unpoisoned();
    listen(workers, context, options, opening)
}
