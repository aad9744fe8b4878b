//! Opening of volumes, block devices, and sockets before anything is served.
//!
//! Everything is opened before the serving threads start: those begin inside the sandbox
//! (`crate::confine`), where nothing can be opened any more.

use crate::confine::socket_maker::SocketMaker;
use crate::confine::{Unconfined, path_check, tcp};
use crate::front::kind::{ListeningDisk, OpenedDisk, Ready};
use crate::front::ublk::OpenDisk;
use crate::keep::Attempt;
use crate::manage::Source;
use crate::open::{OpenedVolume, Opener};
use crate::record::Open as OpenNamespace;
use crate::serve::options::ServeOptions;
use crate::serve::shutdown::{self, NotDurable};
use crate::serve::signals::StopSignal;
use crate::serve::worker_context::WorkerContext;
use anyhow::{Context, Result, anyhow};
use config::access::SocketAccess;
use config::disk::DiskSpec;
use config::origin::Origin;
use config::spec::{NamespaceSpec, Specs};
use config::volumes::{self, is_within};
use receive::Receiver;
use rustix::event::{EventfdFlags, eventfd};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use vfio_user::Listener;
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
    /// Opens the volume of a namespace, unless the thread that serves it has to.
    pub fn new(spec: NamespaceSpec, (disk, nsid): (String, u32), opener: &Opener) -> Result<Self> {
        let opened = if opener.open_below(&spec, &disk, nsid)? {
            None
        } else {
            Some(opener.open(&spec, &disk, nsid)?)
        };
        let of = (disk, nsid);
        Ok(Self { spec, of, opened })
    }

    /// Opens the volume of a namespace that another process may still use, without its lock.
    pub fn incoming(spec: NamespaceSpec, of: (String, u32), opener: &Opener) -> Result<Self> {
        let opened = opener.open_incoming(&spec, &of.0, of.1)?;
        Ok(Self::opened(spec, of, opened))
    }

    /// Creates the volume of a namespace that is open.
    pub fn opened(spec: NamespaceSpec, of: (String, u32), opened: OpenedVolume) -> Self {
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
    fn volume(&self) -> Option<Weak<dyn Volume>> {
        self.opened
            .as_ref()
            .map(|opened| Arc::downgrade(&opened.volume))
    }

    /// Returns the namespace with its volume, for the disk's record.
    pub fn recorded(&self) -> OpenNamespace<'_> {
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
    pub fn outlives_its_process(&self) -> bool {
        let is_fenced = volumes::remote(&self.spec.volume).is_none_or(|kind| kind.is_fenced());
        let opened = self.opened.as_ref();
        opened.is_some_and(|opened| opened.device.is_none() && is_fenced)
    }

    /// Opens the volume on the thread that serves it, or returns the open one. `resized` will be
    /// written to when the size of the volume has changed.
    pub fn open(self, context: &WorkerContext, resized: &Arc<OwnedFd>) -> Result<OpenedVolume> {
        let (disk, nsid) = &self.of;
        let open = || context.opener.open(&self.spec, disk, *nsid);
        let opened = self.opened.map_or_else(open, Ok)?;
        if !is_within(&self.spec.volume) {
            context.sizes.watch(&opened.volume, resized);
        }
        Ok(opened)
    }
}

/// Returns weak references to those volumes that are open, by their NSIDs.
pub fn by_nsid(volumes: &[Prepared]) -> Vec<(u32, Weak<dyn Volume>)> {
    let open = volumes.iter();
    open.filter_map(|volume| Some((volume.of.1, volume.volume()?)))
        .collect()
}

/// Listens at a TCP address.
pub fn listen_at(address: SocketAddr) -> Result<TcpListener> {
    let listener = tcp::listen(address).with_context(|| address.to_string())?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Creates the eventfd that becomes readable when a volume was resized.
pub fn event() -> Result<Arc<OwnedFd>> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(Arc::new(eventfd(0, flags).context("eventfd")?))
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
        self.warn_if_open(socket, access);
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
        origin.place("socket", self.make(socket, access))
    }

    /// Listens at a path with a new socket, where no other one is.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind_new(&self, socket: &Path, access: &SocketAccess) -> Result<Listener> {
        self.warn_if_open(socket, access);
        self.make(socket, access)
    }

    fn warn_if_open(&self, socket: &Path, access: &SocketAccess) {
        if access.is_open_to_all() {
            let socket = socket.display();
            tracing::warn!(%socket, "every user of this machine may connect (socket-mode)");
        }
    }

    fn make(&self, socket: &Path, access: &SocketAccess) -> Result<Listener> {
        match self.maker {
            Some(maker) if !access.is_usual() => maker.listen(socket, access).map_err(Into::into),
            _ => access
                .resolve()
                .and_then(|access| Ok(Listener::bind_for(socket, &access)?)),
        }
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
pub struct Load(pub Vec<(DiskSpec, Box<dyn ListeningDisk>)>);

impl Load {
    /// Returns whether any queue of these disks uses an io_uring.
    pub fn needs_rings(&self) -> bool {
        self.0.iter().any(|(_, disk)| disk.needs_ring())
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
    /// Disks of each worker, which get them in turn.
    pub loads: Vec<Load>,
    pub disks: Vec<OpenDisk>,
    pub unserved: Vec<UnavailableDisk>,
}

/// Disks that have been opened so far, in the order of the specification. No client can connect
/// yet.
#[derive(Default)]
struct Opening {
    disks: Vec<OpenedDisk>,
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
        match room.and_then(|()| OpenedDisk::new(&disk, opener)) {
            Ok(opened) => all.lock().unpoisoned().disks.push(opened),
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
    let (mut opened, mut disks) = (opening.disks, Vec::new());
    // Workers get the disks of one kind in turn before those of the next.
    opened.sort_by_key(|opened| opened.disk.kind());
    for OpenedDisk { disk, ready } in opened {
        let ready = match ready {
            Ready::Listener(ready) => ready,
            Ready::Device(open) => {
                disks.push(*open);
                continue;
            }
        };
        match ready.listen(context, workers) {
            Ok(open) => {
                if let Some(load) = turns.next().and_then(|turn| loads.get_mut(turn)) {
                    load.0.push((disk, open));
                }
            }
            Err(error) => leave_out(disk, error)?,
        }
    }
    Ok(Open {
        loads,
        disks,
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
                        all.disks
                            .retain(|opened| matches!(opened.ready, Ready::Device(_)));
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

#[cfg(test)]
mod tests {
    use super::*;
    use namespace_files::NamespaceFiles;
    use volume::MemVolume;

    /// A late request of the killed process would undo what its repetition has written since.
    #[test]
    fn outstanding_requests_to_unfenced_volumes_are_not_repeated() {
        for (url, repeats) in [
            ("mem://1M", true),
            ("/disks/vm0.raw", true),
            ("nbd://10.0.0.2/export", true),
            ("rbd://pool/image", true),
            ("nvme+tcp://10.0.0.2/nqn.2014-08.org.vnvme:far/1", false),
            (
                "nvme+tcp://10.0.0.2/nqn.2014-08.org.vnvme:far/1?luks=/key",
                false,
            ),
        ] {
            let spec = config::options::url::parse(url).unwrap();
            let opened = OpenedVolume {
                volume: Arc::new(MemVolume::new(1 << 20).unwrap()),
                device: None,
                direct: None,
                files: NamespaceFiles::default(),
                block_size: None,
            };
            let prepared = Prepared::opened(spec, ("disk".into(), 1), opened);
            assert_eq!(prepared.outlives_its_process(), repeats, "{url}");
        }
    }
}
