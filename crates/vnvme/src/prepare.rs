//! What is opened before anything is served: sockets, volumes, block devices.
//!
//! All of it is opened before the threads start that serve it: those are born in the sandbox
//! (`crate::confine`), where nothing can be opened any more.

use crate::ending::{self, NotDurable};
use crate::open::{Opened, Opener};
use crate::signals::Stop;
use crate::spec::{ControllerSpec, NamespaceSpec, Specs, VhostBlkSpec};
use crate::ublk::OpenDisk;
use anyhow::{Context, Result, anyhow};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use vfio_user::Listener;
use volume::Kind;

/// A volume that has been opened, or one that its worker opens.
pub struct Prepared {
    spec: NamespaceSpec,
    /// `None`: it belongs to the thread that serves it, and what is below it is open
    /// ([`Opener::open_below`]).
    opened: Option<Opened>,
}

impl Prepared {
    fn new(spec: NamespaceSpec, opener: &Opener) -> Result<Self> {
        let opened = match opener.open_below(&spec)? {
            true => None,
            false => Some(opener.open(&spec)?),
        };
        Ok(Self { spec, opened })
    }

    /// Its queues go through the ring of the worker that they are on.
    pub fn needs_ring(&self) -> bool {
        let own = self
            .opened
            .as_ref()
            .filter(|opened| opened.device.is_none());
        let kind = own.map(|opened| opened.volume.info().kind);
        matches!(kind, Some(Kind::File | Kind::BlockDevice))
    }

    /// The volume, on the thread that serves it.
    pub fn open(self, opener: &Opener) -> Result<Opened> {
        self.opened.map_or_else(|| opener.open(&self.spec), Ok)
    }
}

/// A controller whose socket and volumes are open.
pub struct OpenController {
    pub spec: ControllerSpec,
    pub listener: Listener,
    /// One for each namespace.
    pub volumes: Vec<Prepared>,
}

impl OpenController {
    pub fn new(spec: &ControllerSpec, opener: &Opener) -> Result<Self> {
        // The socket comes first: a process that serves it already has the volumes, too, and is the
        // better explanation.
        let listener = Listener::bind(&spec.socket)?;
        let volumes = spec.namespaces.iter().cloned();
        let volumes = volumes.map(|namespace| Prepared::new(namespace, opener));
        Ok(Self {
            volumes: volumes.collect::<Result<_>>()?,
            spec: spec.clone(),
            listener,
        })
    }
}

/// A vhost-user-blk export whose socket and volume are open.
pub struct OpenExport {
    pub spec: VhostBlkSpec,
    pub listener: Listener,
    pub volume: Prepared,
    /// Names it in the log.
    pub span: tracing::Span,
}

impl OpenExport {
    pub fn new(spec: &VhostBlkSpec, opener: &Opener) -> Result<Self> {
        let span = tracing::error_span!("export", socket = %spec.socket.display());
        let entered = span.clone().entered();
        // First, as above.
        let listener = Listener::bind(&spec.socket)?;
        let volume = NamespaceSpec {
            volume: spec.volume.clone(),
            block_size: spec.block_size,
            read_only: spec.read_only,
            ..NamespaceSpec::default()
        };
        let volume = Prepared::new(volume, opener)?;
        drop(entered);
        Ok(Self {
            spec: spec.clone(),
            listener,
            volume,
            span,
        })
    }
}

/// What one worker serves.
#[derive(Default)]
pub struct Load {
    pub controllers: Vec<OpenController>,
    pub exports: Vec<OpenExport>,
}

impl Load {
    /// Queues of its controllers go through a ring.
    pub fn needs_rings(&self) -> bool {
        let volumes = self.controllers.iter().flat_map(|open| &open.volumes);
        volumes.into_iter().any(Prepared::needs_ring)
    }
}

/// Everything that is to be served.
pub struct Open {
    /// Of each worker: controllers and exports in turn.
    pub loads: Vec<Load>,
    pub disks: Vec<OpenDisk>,
}

impl Open {
    fn nothing(workers: usize) -> Self {
        let mut loads = Vec::new();
        loads.resize_with(workers, Load::default);
        let disks = Vec::new();
        Self { loads, disks }
    }
}

/// Opens everything; each is in `all` once it is open.
fn open(specs: &Specs, workers: usize, opener: &Opener, all: &Mutex<Open>) -> Result<()> {
    let mut turns = (0..workers).cycle();
    let mut add = |add: &mut dyn FnMut(&mut Load)| {
        let mut all = all.lock().unpoisoned();
        if let Some(load) = turns.next().and_then(|turn| all.loads.get_mut(turn)) {
            add(load);
        }
    };
    for spec in &specs.controllers {
        let mut open = Some(OpenController::new(spec, opener)?);
        add(&mut |load| load.controllers.extend(open.take()));
    }
    for spec in &specs.vhost_user_blk {
        let mut open = Some(OpenExport::new(spec, opener)?);
        add(&mut |load| load.exports.extend(open.take()));
    }
    for spec in &specs.ublk {
        let disk = OpenDisk::new(spec, opener)?;
        all.lock().unpoisoned().disks.push(disk);
    }
    Ok(())
}

/// Between two looks for the order to end.
const LOOK: Duration = Duration::from_millis(100);

/// Opens everything, on a thread of its own: a file that is being opened may hang, which is not to
/// keep the process from ending. And the kernel executes some requests (ublk's) in threads that
/// belong to the one that submits, have its rights, and end with it: none of them is left when the
/// sandbox is entered.
///
/// Where it has not ended within `limit` after the order to end, the process ends, after
/// `clean_up`.
pub fn open_all(
    specs: &Specs,
    workers: usize,
    opener: &Opener,
    (stop, limit): (&Stop, Duration),
    mut clean_up: impl FnMut(),
) -> Result<Open> {
    let all = Mutex::new(Open::nothing(workers));
    let (told, opened) = channel();
    std::thread::scope(|scope| {
        let open = || told.send(open(specs, workers, opener, &all));
        let builder = std::thread::Builder::new().name("open".into());
        let thread = builder.spawn_scoped(scope, open);
        let thread = thread.context("thread \"open\"")?;
        let mut ordered = None;
        let opened = loop {
            match opened.recv_timeout(LOOK) {
                Ok(opened) => break opened,
                Err(RecvTimeoutError::Timeout) if !stop.is_ordered() => {}
                Err(RecvTimeoutError::Timeout) => {
                    if ordered.get_or_insert_with(Instant::now).elapsed() >= limit {
                        // The scope would wait for it. Files that are open are free for others,
                        // who come before the kernel has ended this process.
                        clean_up();
                        drop(std::mem::take(&mut all.lock().unpoisoned().loads));
                        let what = "what is to be served has not been opened";
                        ending::exit(&NotDurable(format!("ended by force: {what}")));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break Err(anyhow!("it ended by a bug")),
            }
        };
        // Its end is the end of the kernel's threads that were its.
        let _ = thread.join();
        opened
    })?;
    Ok(all.into_inner().unpoisoned())
}
