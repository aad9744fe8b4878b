//! `vnvme serve`: from a specification to running workers.

use crate::api::{ControlPlace, ControlSocket, Served as ServedApi};
use crate::balance::Spread;
use crate::check::check;
use crate::confine::Confinement;
use crate::descriptors::limit_clients;
use crate::direct::{DirectPath, PathChoice, check_block_size};
use crate::ending::{self, Ends, NotDurable};
use crate::front::{Front, Handle, NvmeFront, Served, Worker};
use crate::identity;
use crate::notify::ServiceManager;
use crate::open::{Opened, Opener, is_within};
use crate::parts::ublk::{QueueSetup, Told};
use crate::peers::Peers;
use crate::prepare::{Load, Open, OpenController, open_all};
use crate::receiver;
use crate::registry::Registry;
use crate::scrape::MetricsListener;
use crate::signals::Stop;
use crate::sizes::Sizes;
use crate::spec::{
    ControllerSpec, DoorbellMode, MAX_WORKERS, NamespaceSpec, ServeOptions, Specs, hex,
};
use crate::ublk::{Disks, OpenDisk};
use crate::vhost_blk::{FrontEnds, VhostBlk};
use crate::watch::Watch;
use anyhow::{Context, Result, ensure};
use controller::{Controller, ControllerConfig, NamespaceConfig};
use receive::Receiver;
use rustix::event::EventfdFlags;
use rustix::thread::{CpuSet, sched_setaffinity, set_current_timer_slack};
use std::collections::BTreeSet;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use volume::{Extras, Io, IoOptions, Volume};
use worker::Frontend;

/// Most requests that a worker's ring takes.
const RING_CAPACITY: usize = 16384;
/// Requests of one export that may be with its volume, where the ring has room for all.
const EXPORT_IN_FLIGHT: usize = 1024;

/// Between two looks at threads that have not started.
const START_LOOK: Duration = Duration::from_millis(250);

/// How late a sleeping worker may be woken, in nanoseconds.
const TIMER_SLACK: u64 = 1000;

/// A namespace's block size: what was asked for, else what the volume wants, 512 bytes at least.
fn block_size(spec: &NamespaceSpec, volume: &dyn Volume) -> u32 {
    spec.block_size
        .unwrap_or_else(|| volume.info().block_size.max(512))
}

/// A controller's configuration, as far as it does not depend on its volumes.
pub fn config(spec: &ControllerSpec, serial: String) -> ControllerConfig {
    let default = ControllerConfig::default();
    ControllerConfig {
        model: spec.model.clone().unwrap_or(default.model),
        firmware: spec.firmware.clone().unwrap_or(default.firmware),
        subnqn: Some(
            spec.subnqn
                .clone()
                .unwrap_or_else(|| identity::subnqn(&serial)),
        ),
        serial,
        io_queues: spec.io_queues.unwrap_or(default.io_queues),
        queue_entries: spec.queue_entries.unwrap_or(default.queue_entries),
        mdts: spec.mdts.unwrap_or(default.mdts),
        mapped_doorbells: spec.doorbells == Some(DoorbellMode::Mapped),
        shadow_doorbells: spec.shadow_doorbells.unwrap_or(default.shadow_doorbells),
        write_cache: spec.write_cache.unwrap_or(default.write_cache),
        ..ControllerConfig::default()
    }
}

fn served(id: u16, open: OpenController, io: &Io, crew: &Crew<'_>) -> Result<Served> {
    let OpenController {
        spec,
        listener,
        volumes: prepared,
    } = open;
    let spec = &spec;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let resized = Arc::new(rustix::event::eventfd(0, flags).context("eventfd")?);
    let paths = &crew.registry.paths;
    ensure!(!spec.namespaces.is_empty(), "no volume to serve");
    let opened = prepared
        .into_iter()
        .map(|volume| volume.open(crew.opener))
        .collect::<Result<Vec<_>>>()?;
    let (mut volumes, mut backends, mut directs) = (Vec::new(), Vec::new(), Vec::new());
    for Opened {
        volume,
        device,
        direct,
    } in opened
    {
        volumes.push(volume);
        backends.extend(device);
        directs.push(direct);
    }
    let ids: Vec<Vec<u8>> = volumes.iter().map(|v| v.id()).collect();
    let serial = spec
        .serial
        .clone()
        .unwrap_or_else(|| identity::serial(&ids));
    let mut namespaces = Vec::new();
    for (i, (ns, volume)) in spec.namespaces.iter().zip(volumes).enumerate() {
        let nsid = ns.nsid.unwrap_or(i as u32 + 1);
        let id = volume.id();
        if !is_within(&ns.volume) {
            crew.sizes.watch(volume.clone(), &resized);
        }
        namespaces.push(NamespaceConfig {
            nsid,
            block_size: block_size(ns, &*volume),
            read_only: ns.is_read_only(),
            nguid: match &ns.nguid {
                Some(text) => hex("nguid", text)?,
                None => identity::nguid(&serial, nsid, &id),
            },
            eui64: match &ns.eui64 {
                Some(text) => hex("eui64", text)?,
                None => identity::eui64(&serial, nsid, &id),
            },
            volume,
        });
    }
    let shown: Vec<(u32, u32)> = namespaces
        .iter()
        .map(|ns| (ns.nsid, ns.block_size))
        .collect();
    // What is limited gains nothing by another worker.
    let limited =
        |ns: &NamespaceSpec| Extras::split(&ns.volume).is_ok_and(|(_, extras)| extras.is_limited());
    let spread = if spec.namespaces.iter().any(limited) {
        Spread::Off
    } else {
        crew.options.spread
    };
    let workers = match spread {
        Spread::Off => 1,
        Spread::Auto | Spread::Stir => u16::try_from(crew.peers.count()).unwrap_or(u16::MAX),
    };
    let config = ControllerConfig {
        workers,
        ..config(spec, serial)
    };
    let mut controller = Controller::new(id, config, namespaces, io)?;
    let max_transfer = 4096 << controller.config().mdts;
    for ((ns, direct), (nsid, block_size)) in spec.namespaces.iter().zip(directs).zip(shown) {
        let Some(direct) = direct else {
            continue;
        };
        let path = check_block_size(&direct, block_size).and_then(|()| {
            DirectPath::new(
                &direct,
                nsid,
                &spec.socket,
                max_transfer,
                paths,
                io.watcher(),
            )
        });
        match path {
            Ok(path) => {
                controller.set_passthrough(nsid, Box::new(path));
            }
            Err(error) if ns.path == Some(PathChoice::Direct) => {
                return Err(error.context(format!("{}: path=direct", ns.volume)));
            }
            Err(error) => {
                tracing::info!(volume = %ns.volume, %error, "the generic path is taken");
            }
        }
    }
    Ok(Served {
        controller,
        listener,
        backends,
        spread,
        resized,
        limits: crew.options.clients,
    })
}

/// What all workers have in common.
struct Crew<'a> {
    options: &'a ServeOptions,
    opener: &'a Opener,
    registry: &'a Registry,
    sizes: &'a Sizes,
    peers: &'a Arc<Peers>,
    /// The process that receives clients' descriptors.
    receiver: &'a Receiver,
    confinement: &'a Confinement,
    /// Queues of a controller that need a ring may come to any worker, later.
    rings: bool,
    /// Controllers of all workers together.
    controllers: usize,
    /// The worker whose turn it is after all controllers and exports.
    turn: usize,
    /// Requests that all block devices may have together.
    tags: usize,
}

/// Makes a worker and what it serves, on its own thread.
fn worker(index: usize, load: Load, stop: OwnedFd, crew: &Crew<'_>) -> Result<Worker> {
    // Else a guest would find out that no interrupt comes.
    eventfd::prepare()?;
    let options = crew.options;
    let handle = crew
        .peers
        .handle(index)
        .context("a worker without a handle")?;
    // Queues of any controller may come here.
    let controllers = match options.spread {
        Spread::Off => load.controllers.len(),
        Spread::Auto | Spread::Stir => crew.controllers,
    };
    // So may queues of any block device. Requests that each may have in flight:
    let room = controllers * usize::from(ControllerConfig::default().max_in_flight)
        + load.exports.len() * EXPORT_IN_FLIGHT
        + crew.tags;
    let of_export = match room.div_ceil(RING_CAPACITY) {
        0 | 1 => EXPORT_IN_FLIGHT,
        times => EXPORT_IN_FLIGHT / times,
    };
    let io = Rc::new(Io::new(IoOptions {
        capacity: room.clamp(512, RING_CAPACITY) as u32,
        ..options.polling.io()
    }));
    crew.registry.rings.enter(io.stats());
    if crew.rings
        && let Err(error) = io.make_ring()
    {
        tracing::warn!(worker = index, %error, "queues of files cannot come here");
    }
    let options = worker::Options {
        idle_window: options.polling.idle_window,
        shares_cpu: options.cpus.is_empty(),
        stop: Some(stop),
    };
    let mut worker = Worker::new(io, handle, options)?;
    for open in load.controllers {
        let (socket, namespaces) = (open.spec.socket.clone(), open.spec.namespaces.len());
        let origin = open.spec.origin.clone();
        let added = worker.add(|context| {
            let one = origin.place("", served(context.owner, open, context.io, crew))?;
            let stats = one.controller.stats();
            let serial = one.controller.config().serial.clone();
            let mut front =
                NvmeFront::new(one, context, index, crew.peers, crew.receiver).context("epoll")?;
            tracing::info!(socket = %socket.display(), serial, namespaces, "listening");
            crew.registry.enter(&socket, stats, front.accepts());
            front.tell(&crew.registry.events);
            Ok::<_, anyhow::Error>(Front::Nvme(Box::new(front)))
        })?;
        let owner = added.context("too many controllers")?;
        handle.set_name(owner, socket.display().to_string());
    }
    for open in load.exports {
        let socket = open.spec.socket.clone();
        let origin = open.spec.origin.clone();
        let added = worker.add(|context| {
            let (opener, registry) = (crew.opener, crew.registry);
            let clients = FrontEnds {
                memory: crew.options.clients.memory,
                connects: crew.options.clients.connects,
                receiver: crew.receiver,
            };
            let export = VhostBlk::new(
                open, of_export, &clients, context, opener, registry, crew.sizes,
            );
            let export = origin.place("", export)?;
            let stats = export.stats();
            let requests = move || stats.queues.iter().map(|queue| queue.requests.get()).sum();
            crew.peers.enter_fixed(index, requests);
            Ok::<_, anyhow::Error>(Front::VhostBlk(Box::new(export)))
        })?;
        let owner = added.context("too many exports")?;
        handle.set_name(owner, socket.display().to_string());
    }
    Ok(worker)
}

fn pin(cpu: usize) -> Result<()> {
    ensure!(cpu < CpuSet::MAX_CPU, "there is no CPU {cpu}");
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("CPU {cpu}"))
}

/// How many workers there are: not more than front-ends, where queues do not leave their
/// controller's worker.
fn workers(specs: &Specs, options: &ServeOptions) -> usize {
    let queues = specs.ublk.iter().map(|disk| usize::from(disk.queues()));
    let fronts = specs.controllers.len() + specs.vhost_user_blk.len() + queues.sum::<usize>();
    let most = match (options.spread, specs.controllers.len()) {
        (Spread::Off, _) | (_, 0) => fronts,
        (Spread::Auto | Spread::Stir, _) => usize::from(MAX_WORKERS),
    };
    usize::from(options.workers).min(most)
}

/// Says so when workers have to share CPUs: one that polls keeps the others waiting.
fn warn_of_few_cpus(workers: usize, pinned: &[usize]) {
    let cpus = match pinned {
        // Those that the process may use.
        [] => std::thread::available_parallelism().map_or(workers, NonZeroUsize::get),
        pinned => pinned.iter().collect::<BTreeSet<_>>().len(),
    };
    if workers > cpus {
        tracing::warn!(
            "{workers} workers have {cpus} CPUs: one that polls keeps others waiting; more workers \
             than CPUs gain nothing"
        );
    }
}

/// Makes a worker and all that it serves, says how that went, and serves it.
fn run_worker(
    index: usize,
    load: Load,
    stop: OwnedFd,
    crew: &Crew<'_>,
    started: &mpsc::Sender<Result<()>>,
) -> Result<()> {
    let made = worker(index, load, stop, crew);
    go(made, started, |mut worker| {
        crew.confinement.wait();
        worker.run().map_err(ended)
    })
}

/// Starts the block devices, whose queues go to the workers, says how that went, and removes them
/// in the end.
fn run_disks(
    disks: Vec<OpenDisk>,
    stop: OwnedFd,
    crew: &Crew<'_>,
    started: &mpsc::Sender<Result<()>>,
) -> Result<()> {
    // After the controllers and exports, in turn.
    let mut turns = (0..crew.peers.count()).cycle().skip(crew.turn);
    let mut pass = |setup: QueueSetup| {
        let Some(turn) = turns.next() else {
            return;
        };
        let (stats, number) = (setup.stats(), usize::from(setup.number()));
        let queue = move || stats.queues.get(number).map_or(0, |q| q.requests.get());
        crew.peers.enter_fixed(turn, queue);
        if let Some(worker) = crew.peers.handle(turn) {
            worker.post(|worker| serve_queue(worker, setup));
        }
    };
    let made = Disks::new(disks, stop, crew.registry, crew.sizes, &mut pass);
    go(made, started, Disks::run)
}

/// How a worker has ended.
fn ended(error: worker::Error<<Front as Frontend>::Error>) -> anyhow::Error {
    match error {
        worker::Error::GivenUp(_) | worker::Error::NotDurable(_) => {
            NotDurable(error.to_string()).into()
        }
        error => error.into(),
    }
}

/// Opens a queue of a block device on the worker that is to serve it. The device waits to be told
/// how that went.
fn serve_queue(worker: &mut Worker, setup: QueueSetup) {
    let name = format!("queue {} of /dev/ublkb{}", setup.number(), setup.stats().id);
    let added = worker.add(|context| Ok::<_, Told>(Front::Ublk(Box::new(setup.open(context)?))));
    match added {
        Ok(Some(owner)) => worker.handle().set_name(owner, name),
        Ok(None) => {
            tracing::error!("no queue of a block device can be added to this worker: it is full");
        }
        Err(_) => {}
    }
}

/// Says how the start went, and goes on if it went well.
fn go<T>(
    made: Result<T>,
    started: &mpsc::Sender<Result<()>>,
    run: impl FnOnce(T) -> Result<()>,
) -> Result<()> {
    match made {
        Ok(made) => {
            let _ = started.send(Ok(()));
            run(made)
        }
        Err(error) => {
            let _ = started.send(Err(error));
            Ok(())
        }
    }
}

/// Closes a worker's handle when it is dropped: what was posted to a worker that could not start is
/// not waited for.
struct Close<'a>(Option<&'a Handle>);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        if let Some(handle) = self.0 {
            handle.close();
        }
    }
}

/// Ends all threads when it is dropped: they are not left waiting for one that has failed.
struct EndAll<'a>(&'a Stop);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        self.0.now();
    }
}

/// Serves until a signal asks for the end (see [`Stop`]).
pub fn serve(specs: &Specs, options: &ServeOptions) -> Result<()> {
    let mut options = options.clone();
    let place = ControlPlace::new(options.control.as_deref());
    options.control.clone_from(&place.path);
    check(specs, options.control.as_deref())?;
    let workers = workers(specs, &options);
    warn_of_few_cpus(workers, &options.cpus);
    limit_clients(specs, workers, &mut options.clients);
    let options = &options;
    // First: it is to have no thread's affinity, and no descriptor of what is opened later.
    let receiver = &receiver::start(options.sandbox)?;
    let stop = &Stop::on_signals(options.sandbox)?;
    let handles = (0..workers).map(|_| Handle::new());
    let peers = &Arc::new(Peers::new(handles.collect::<Result<_, _>>()?));
    let registry = &Registry::new(specs, peers);
    let (limits, devices) = (registry.limits.clone(), registry.devices.clone());
    let opener = &Opener::new(limits, devices, options.sandbox);
    let sizes = &Sizes::default();
    let confinement = &Confinement::new(specs, options);
    // All that has a path is opened before the sandbox is entered.
    let manager = ServiceManager::from_environment();
    let mut control = ControlSocket::listen(&place, options.clients.connects, receiver)?;
    let metrics = options.metrics.map(MetricsListener::bind).transpose()?;
    let end = (stop, options.polling.stop_timeout);
    let open = open_all(specs, workers, opener, end, || drop(control.take()));
    let Open { loads, disks } = open?;
    let crew = &Crew {
        options,
        opener,
        registry,
        sizes,
        peers,
        receiver,
        confinement,
        rings: options.spread != Spread::Off && loads.iter().any(Load::needs_rings),
        controllers: specs.controllers.len(),
        tags: specs
            .ublk
            .iter()
            .map(|disk| usize::from(disk.queues()) * (usize::from(disk.depth()) + 1))
            .sum(),
        turn: (specs.controllers.len() + specs.vhost_user_blk.len()) % workers.max(1),
    };
    confinement.enter()?;
    let daemon = Arc::new(ServedApi::new(registry, specs));
    let control = control.map(|socket| socket.start(daemon)).transpose()?;
    let _metrics = metrics.map(|socket| socket.start(registry)).transpose()?;
    serve_opened(loads, disks, control, manager, stop, crew)
}

/// Runs all threads, to their end.
fn serve_opened(
    loads: Vec<Load>,
    disks: Vec<OpenDisk>,
    mut control: Option<control::server::Running>,
    mut manager: ServiceManager,
    stop: &Stop,
    crew: &Crew<'_>,
) -> Result<()> {
    let cpus = &crew.options.cpus;
    let workers = loads.len();
    let ends = &Ends::new();
    let mut watch = Watch::new(crew.peers);
    std::thread::scope(|scope| {
        // Also where a thread cannot be started.
        let _end = EndAll(stop);
        let _release = Release(crew.confinement);
        let (started, starts) = mpsc::channel::<Result<()>>();
        for (i, load) in loads.into_iter().enumerate() {
            let (descriptor, started) = (stop.descriptor()?, started.clone());
            let cpu = (!cpus.is_empty())
                .then(|| cpus.get(i % cpus.len()).copied())
                .flatten();
            let tell = ends.tell(i);
            let run = move || -> Result<()> {
                // Deadlines of limits and weights are some microseconds away: the system may not
                // add fifty to each.
                if let Err(error) = set_current_timer_slack(NonZeroU64::new(TIMER_SLACK)) {
                    tracing::debug!(%error, "timers stay as late as they are");
                }
                // When one fails, or panics, the others are to end well: queues of theirs may be
                // here.
                let end = EndAll(stop);
                let _close = Close(crew.peers.handle(i));
                match cpu.map_or(Ok(()), pin) {
                    Ok(()) => run_worker(i, load, descriptor, crew, &started),
                    Err(error) => go(Err::<(), _>(error), &started, Ok),
                }?;
                std::mem::forget(end);
                Ok(())
            };
            let builder = std::thread::Builder::new().name(format!("worker-{i}"));
            let thread = builder.spawn_scoped(scope, move || tell.run(run));
            thread.context("worker thread")?;
        }
        drop(started);
        let mut result = all_started(&starts, workers, stop, &mut watch);
        // The queues of the block devices need workers that run: the list of system calls has what
        // they are made with.
        result = result.and(crew.confinement.seal());
        let mut threads = workers;
        if !disks.is_empty() && result.is_ok() {
            let (started, starts) = mpsc::channel();
            let (descriptor, tell) = (stop.descriptor()?, ends.tell(threads));
            let run = move || -> Result<()> {
                let end = EndAll(stop);
                run_disks(disks, descriptor, crew, &started)?;
                std::mem::forget(end);
                Ok(())
            };
            let builder = std::thread::Builder::new().name("ublk".into());
            let thread = builder.spawn_scoped(scope, move || tell.run(run));
            thread.context("ublk thread")?;
            threads += 1;
            result = all_started(&starts, 1, stop, &mut watch);
        }
        match &result {
            Ok(()) => manager.ready(),
            Err(_) => stop.now(),
        }
        // Until the end: a thread that fails asks for it, too.
        let sizes = crew.sizes;
        sizes.run(&stop.descriptor()?, || {
            watch.look();
            crew.registry.look();
            manager.alive(|interval| !watch.all_stuck(interval));
        });
        manager.stopping();
        let limit = crew.options.polling.stop_timeout;
        match ends.wait(threads, workers, limit, || stop.now(), &mut watch) {
            Ok(end) => {
                sizes.end();
                result.and(end)
            }
            // Threads are left that the scope would wait for.
            Err(left) => {
                drop(control.take());
                // Files whose workers have ended are free for others.
                sizes.end();
                if let Err(error) = &result {
                    tracing::error!(error = format_args!("{error:#}"), "not everything started");
                }
                ending::exit(&left)
            }
        }
    })
}

/// Waits until so many threads have said how their start went; one that cannot start ends them all.
/// The order to end is not kept waiting.
fn all_started(
    starts: &mpsc::Receiver<Result<()>>,
    count: usize,
    stop: &Stop,
    watch: &mut Watch,
) -> Result<()> {
    let mut result = Ok(());
    let mut starting = count;
    while starting > 0 {
        match starts.recv_timeout(START_LOOK) {
            Ok(start) => {
                starting -= 1;
                if start.is_err() && result.is_ok() {
                    result = start;
                    stop.now();
                }
            }
            Err(RecvTimeoutError::Timeout) if stop.is_ordered() => break,
            Err(RecvTimeoutError::Timeout) => watch.look(),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    result
}

/// Releases the workers when it is dropped: they are not left waiting for one that has failed.
struct Release<'a>(&'a Confinement);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}
