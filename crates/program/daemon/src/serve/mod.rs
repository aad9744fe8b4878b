//! `vnvme serve`, `vnvme daemon`: from a specification to running workers.

pub(crate) mod balance;
pub(crate) mod heap;
pub(crate) mod notify;
pub mod options;
pub(crate) mod peers;
pub(crate) mod rings;
pub(crate) mod scrape;
pub mod shutdown;
pub(crate) mod signals;
pub(crate) mod watch;
pub(crate) mod worker_context;

use crate::api::{ControlPlace, ControlSocket, ServedProcess as ServedApi};
use crate::check::check;
use crate::confine::descriptors::limit_clients;
use crate::confine::path_check::check_at_start;
use crate::confine::receiver;
use crate::confine::socket_maker::Grants;
use crate::confine::{Confinement, Sealed, Unconfined};
use crate::front::kind::{AddedFrontend, RingUse, Seat, front_end};
use crate::front::ublk::{Disks, OpenDisk};
use crate::front::{Front, Handle, Worker};
use crate::keep::{Attempt, KeeperSession, PreviousConfiguration};
use crate::manage::{DiskServer, DiskTable, Manager, ServedDisk};
use crate::open::Opener;
use crate::open::prepare::{
    ListenContext, Load, Open, UnavailableDisk, by_nsid, make_room_for_all, open_all,
};
use crate::registry::Registry;
use crate::registry::sizes::Sizes;
use crate::serve::heap::Heap;
use crate::serve::notify::ServiceManager;
use crate::serve::options::ServeOptions;
use crate::serve::peers::Peers;
use crate::serve::scrape::MetricsListener;
use crate::serve::shutdown::{NotDurable, ThreadResults};
use crate::serve::signals::StopSignal;
use crate::serve::watch::Watch;
use crate::serve::worker_context::WorkerContext;
use anyhow::{Context, Result, anyhow, bail, ensure};
use config::check::check_filled;
use config::choices::Spread;
use config::disk::DiskSpec;
use config::spec::{MAX_WORKERS, Specs};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity, set_current_timer_slack};
use std::collections::BTreeSet;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak, mpsc};
use std::thread::Scope;
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, Volume, VolumeError};
use worker::Frontend;

/// Maximum number of outstanding requests of a worker's io_uring.
const RING_CAPACITY: usize = 16384;
/// Minimum capacity of a worker's io_uring if disks may be added later.
const RING_OF_DAEMON: usize = 4096;
/// Longest wait of a worker for the memory of its ring.
const RING_TIMEOUT: Duration = Duration::from_secs(10);
const RING_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Interval of checks on whether all threads have started.
const START_LOOK: Duration = Duration::from_millis(250);

/// Maximum delay in nanoseconds with which the kernel may wake a sleeping worker (timer slack).
const TIMER_SLACK: u64 = 1000;

/// Creates a worker and its front-ends, on the worker's thread.
fn worker(
    index: usize,
    load: Load,
    stop: OwnedFd,
    worker_context: &WorkerContext,
) -> Result<Worker> {
    // A failure now is better than a guest with missing interrupts.
    eventfd::prepare()?;
    let options = &worker_context.options;
    let handle = worker_context
        .peers
        .handle(index)
        .context("a worker without a handle")?;
    // The room is for the requests that each front-end may have in flight, here or on any worker.
    let own = load.0.iter();
    let own = own.map(|(disk, _)| front_end(disk).ring_use(options.spread).own);
    let room = own.sum::<usize>() + worker_context.requests;
    let crowding = room.div_ceil(RING_CAPACITY).max(1);
    let least = match options.daemon {
        Some(_) => RING_OF_DAEMON,
        None => 512,
    };
    let io = Rc::new(Io::new(IoOptions {
        capacity: room.clamp(least, RING_CAPACITY) as u32,
        ..options.polling.io()
    }));
    worker_context.registry.rings.enter(io.stats());
    let needs_ring = load.needs_rings();
    if (worker_context.rings || needs_ring)
        && let Err(error) = make_ring(&io)
    {
        // The disks of a previous process wait with their clients for a process that has a ring.
        if needs_ring && worker_context.opener.keeper.is_successor() {
            return Err(error).context(format!("worker {index}"));
        }
        tracing::warn!(worker = index, %error, "queues of files cannot migrate to this worker");
    }
    let options = worker::Options {
        idle_window: options.polling.idle_window,
        max_poll_interval: options.polling.max_poll_interval,
        shares_cpu: options.cpus.is_empty(),
        stop: Some(stop),
    };
    let mut worker = Worker::new(io, handle, options)?;
    for (disk, open) in load.0 {
        let _attempt = Attempt::new(&worker_context.opener.keeper, &disk.name());
        let (volumes, resized) = (by_nsid(open.volumes()), open.resized());
        let seat = Seat {
            worker: index,
            assignment: worker_context.peers.assign(index),
            crowding,
        };
        let added = open.serve(&mut worker, seat, worker_context);
        enter(worker_context, disk, index, added, volumes, resized)?;
    }
    Ok(worker)
}

/// Creates a worker's ring. Linux releases the rings of an ended process some time after its end,
/// and counts them against the user's limit of locked memory until then.
///
/// # Errors
/// The kernel refuses to create a ring, or memory for it is missing for [`RING_TIMEOUT`].
fn make_ring(io: &Io) -> Result<(), VolumeError> {
    let end = Instant::now() + RING_TIMEOUT;
    let mut is_first = true;
    loop {
        match io.make_ring() {
            Err(VolumeError::NoIoUring { why, source })
                if source.raw_os_error() == Some(Errno::NOMEM.raw_os_error())
                    && Instant::now() < end =>
            {
                if std::mem::take(&mut is_first) {
                    tracing::warn!("waiting for an io_uring: {why}");
                }
                std::thread::sleep(RING_RETRY_INTERVAL);
            }
            made => return made,
        }
    }
}

/// Enters a disk that is served from the start. One that an earlier process has kept may fail.
fn enter(
    worker_context: &WorkerContext,
    spec: DiskSpec,
    worker: usize,
    owner: Result<AddedFrontend>,
    volumes: Vec<(u32, Weak<dyn Volume>)>,
    resized: Arc<OwnedFd>,
) -> Result<()> {
    let source = worker_context.options.source(&spec.name());
    match owner {
        Ok(AddedFrontend { owner, serial }) => {
            front_end(&spec).say_listening(&serial);
            let running = ServedDisk {
                server: DiskServer::Worker { worker, owner },
                volumes,
                resized,
            };
            worker_context
                .table
                .enter(spec.completed(), source, running);
            Ok(())
        }
        Err(error) if worker_context.options.may_be_left_out(&spec.name()) => {
            worker_context.leave_out(UnavailableDisk::new(spec, &error));
            Ok(())
        }
        Err(error) => Err(worker_context.options.not_served(&spec.name(), error)),
    }
}

fn pin(cpu: usize) -> Result<()> {
    ensure!(cpu < CpuSet::MAX_CPU, "there is no CPU {cpu}");
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("CPU {cpu}"))
}

/// Refuses CPUs that this process may not run on. Warns about CPUs that no worker is pinned to.
fn check_cpus(cpus: &[usize], workers: usize) -> Result<()> {
    let allowed = sched_getaffinity(None).context("the CPUs of this process")?;
    let is_allowed = |cpu: usize| cpu < CpuSet::MAX_CPU && allowed.is_set(cpu);
    if let Some(cpu) = cpus.iter().copied().find(|cpu| !is_allowed(*cpu)) {
        let all = (0..CpuSet::MAX_CPU).filter(|cpu| is_allowed(*cpu));
        bail!(
            "--cpus: CPU {cpu} does not exist, or this process may not use it; it may use {}",
            ranges(all)
        );
    }
    if cpus.len() > workers {
        let (used, unused) = cpus.split_at(workers);
        tracing::warn!(
            "--cpus: no worker is on CPU {}, since {} and each has one CPU; start {} workers \
             (--workers), or name {} only",
            ranges(unused.iter().copied()),
            match workers {
                1 => "there is 1 worker".to_owned(),
                workers => format!("there are {workers} workers"),
            },
            cpus.len(),
            ranges(used.iter().copied()),
        );
    }
    Ok(())
}

/// Writes ascending numbers as a list of ranges: `0-3,8`.
fn ranges(numbers: impl Iterator<Item = usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let texts = ranges.iter().map(|(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    texts.collect::<Vec<_>>().join(",")
}

/// Returns the number of workers: not more than front-ends, where queues do not leave their
/// controller's worker.
fn workers(specs: &Specs, options: &ServeOptions) -> usize {
    let most = match options.daemon {
        Some(_) => usize::from(MAX_WORKERS),
        None => DiskSpec::all(specs)
            .iter()
            .map(|disk| front_end(disk).max_workers(options.spread))
            .sum(),
    };
    usize::from(options.workers).min(most)
}

/// Warns when workers have to share CPUs: a polling worker delays the rest.
fn warn_of_few_cpus(workers: usize, pinned: &[usize]) {
    let cpus = match pinned {
        // CPUs that the process may use.
        [] => std::thread::available_parallelism().map_or(workers, NonZeroUsize::get),
        pinned => pinned.iter().collect::<BTreeSet<_>>().len(),
    };
    if workers > cpus {
        tracing::warn!(
            "{workers} workers share {cpus} CPUs: a polling worker delays the others; use at most \
             one worker for each CPU"
        );
    }
}

/// Creates a worker and its front-ends, reports the result, and runs the worker's loop.
fn run_worker(
    index: usize,
    load: Load,
    stop: OwnedFd,
    worker_context: &WorkerContext,
    started: &mpsc::Sender<Result<()>>,
) -> Result<()> {
    let made = worker(index, load, stop, worker_context);
    go(made, started, |mut worker| {
        worker_context.confinement.wait();
        worker.run().map_err(ended)
    })
}

/// Starts the block devices, which the workers serve, reports the result, and removes the devices
/// at the end.
fn run_disks(
    disks: Vec<OpenDisk>,
    stop: OwnedFd,
    worker_context: &WorkerContext,
    started: &mpsc::Sender<Result<()>>,
) -> Result<()> {
    let made = worker_context.disks.start(disks, worker_context);
    let goes_on = worker_context.options.daemon.is_some();
    go(made, started, |()| worker_context.disks.run(&stop, goes_on))
}

/// Converts a worker's error.
fn ended(error: worker::Error<<Front as Frontend>::Error>) -> anyhow::Error {
    match error {
        worker::Error::GivenUp(_) | worker::Error::NotDurable(_) => {
            NotDurable(error.to_string()).into()
        }
        error => error.into(),
    }
}

/// Reports whether the start has succeeded, and calls the function that runs if it has.
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

/// Guard that calls a function when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Gives every disk a name. Where two have the same file name, `serve` names both by their whole
/// paths; a daemon refuses that, since its disks are added and removed by name.
pub fn named(specs: &Specs, options: &ServeOptions) -> Result<Specs> {
    let mut specs = specs.clone();
    let all = DiskSpec::all(&specs);
    let (mut seen, mut twice) = (BTreeSet::new(), BTreeSet::new());
    for disk in &all {
        let name = disk.name();
        let named = matches!(disk, DiskSpec::Ublk(spec) if spec.name.is_none());
        if named || seen.insert(name.clone()) {
            continue;
        }
        let refused = ensure_unique(&name, options);
        disk.origin().place("name", refused)?;
        twice.insert(name);
    }
    let whole = |name: String, socket: &std::path::Path| {
        if twice.contains(&name) {
            socket.display().to_string()
        } else {
            name
        }
    };
    for disk in specs.iter_mut() {
        let name = disk.name();
        if let Some(socket) = disk.socket() {
            *disk.name_mut() = Some(whole(name, socket));
        }
    }
    Ok(specs)
}

/// Starts a thread that reloads the configuration at each SIGHUP.
fn reload_on_hangup(stop: &StopSignal, managed: &Arc<Manager>) -> Result<()> {
    let hangups = stop.hangups();
    let managed = managed.clone();
    let builder = std::thread::Builder::new().name("reload".into());
    let reload = move || {
        for () in hangups {
            managed.reload_and_tell();
        }
    };
    // The thread runs as long as the process.
    builder.spawn(reload).context("reload thread")?;
    Ok(())
}

fn ensure_unique(name: &str, options: &ServeOptions) -> Result<()> {
    ensure!(
        options.daemon.is_none(),
        "two disks are called \"{name}\" (without a name of its own, a disk has that of its \
         socket's file): write name = \"...\" into one of them"
    );
    Ok(())
}

/// Serves until a signal asks for the end (see `StopSignal`).
pub fn serve(specs: &Specs, options: &ServeOptions, mut keeper: KeeperSession) -> Result<()> {
    keeper.name_process();
    let begun = named(specs, options).and_then(|specs| {
        keeper.begin(&specs, options)?;
        Ok(specs)
    });
    let keeper = &Arc::new(keeper);
    let served = begun.and_then(|specs| serve_all(&specs, options, keeper));
    if let Err(error) = &served {
        keeper.tell_failure(error);
    }
    served
}

fn serve_all(specs: &Specs, options: &ServeOptions, keeper: &Arc<KeeperSession>) -> Result<()> {
    let outside = Unconfined::at_start();
    let mut options = options.clone();
    options.begin(keeper);
    let place = ControlPlace::new(options.control.as_deref());
    options.control.clone_from(&place.path);
    let kept = options.daemon.iter().flat_map(|daemon| &daemon.kept);
    let all = DiskSpec::all(specs);
    check_at_start(all.iter().chain(kept), &options, |name| {
        !options.may_be_unavailable(name)
    });
    check(specs, options.control.as_deref(), &options.answers)?;
    if options.daemon.is_none() {
        check_filled(specs)?;
    }
    if !keeper.was_noted() {
        let process = &specs.process;
        let said = options.daemon.as_ref();
        let said = said.map_or(process, |daemon| &daemon.process);
        let daemon = options.daemon.clone().unwrap_or_default();
        let now = PreviousConfiguration {
            file: daemon.file,
            ..PreviousConfiguration::new(all.iter(), process, daemon.kept, said)
        };
        keeper.note_first(&now).context("keeper")?;
    }
    let (kept, left_out) = options.kept_beside(specs);
    for unserved in &left_out {
        let name = unserved.disk.name();
        if !options.may_be_left_out(&name) {
            return Err(options.not_served(&name, anyhow!("{}", unserved.why)));
        }
    }
    let specs = &{
        let mut specs = specs.clone();
        specs.extend(kept);
        specs
    };
    keeper.expect_disks(specs.controllers.len());
    let workers = workers(specs, &options);
    check_cpus(&options.cpus, workers)?;
    warn_of_few_cpus(workers, &options.cpus);
    let grows = options.daemon.is_some();
    let room = limit_clients(specs, workers, grows, &mut options.clients);
    // The receiver process starts first: it must not have any thread's CPU affinity, nor
    // descriptors that are opened later.
    let grants = Grants::new(&options, &specs.process.access, &DiskSpec::all(specs));
    let (receiver, socket_maker, path_checker) = receiver::start(&outside, &options, grants)?;
    keeper.tell_receiver(&receiver)?;
    keeper.die_of_panics();
    let stop = &StopSignal::on_signals(&outside, options.sandbox, keeper)?;
    let handles = (0..workers).map(|_| Handle::new());
    let peers = Arc::new(Peers::new(handles.collect::<Result<_, _>>()?));
    let registry = Registry::new(specs, &peers, keeper);
    registry.settings.set(options.settings.clone());
    let opener = Opener::new(&outside, &registry, &options);
    for disk in DiskSpec::all(specs) {
        if keeper.was_served(&disk, &options.unavailable) {
            opener.records.enter_continued(&disk);
        }
    }
    // All that has a path is opened before the sandbox is entered.
    let manager = ServiceManager::from_environment(&outside, keeper);
    make_room_for_all(specs, &opener, &options)?;
    let mut control = ControlSocket::listen(
        &outside,
        &place,
        options.control_group.as_ref(),
        options.clients.connects,
        &receiver,
        keeper,
    )?;
    let bind = |address| MetricsListener::bind(&outside, address, keeper);
    let metrics = options.metrics.map(bind).transpose()?;
    let context = ListenContext {
        usual: &specs.process.access,
        receiver: &receiver,
        maker: None,
        opener: &opener,
    };
    let clean_up = || drop(control.take());
    let Open {
        loads,
        disks,
        unserved,
    } = open_all(&outside, specs, workers, &context, &options, stop, clean_up)?;
    keeper.inherited.warn_of_others();
    let left_out: Vec<UnavailableDisk> = left_out.into_iter().chain(unserved).collect();
    let unavailable: Vec<DiskSpec> = left_out.iter().map(|one| one.disk.clone()).collect();
    keeper.discard_rest(&unavailable);
    let block_devices = Disks::new()?;
    keeper.outlive_keeper()?;
    let confinement = Confinement::enter(outside, specs, &options, &unavailable, keeper)?;
    // An unavailable disk may come to any worker later.
    let grows = grows || !unavailable.is_empty();
    let all = DiskSpec::all(specs);
    let uses = all
        .iter()
        .map(|disk| front_end(disk).ring_use(options.spread));
    let uses: Vec<RingUse> = uses.collect();
    let worker_context = Arc::new(WorkerContext {
        rings: grows
            || uses.iter().any(|one| one.is_early)
            || (options.spread != Spread::Off && loads.iter().any(Load::needs_rings)),
        requests: uses.iter().map(|one| one.everywhere).sum(),
        table: Arc::new(DiskTable::new(
            options.control.clone(),
            options.answers.clone(),
        )),
        disks: block_devices,
        sizes: Sizes::default(),
        heap: Heap::default(),
        service: manager.link().clone(),
        options,
        opener,
        registry,
        peers,
        receiver,
        socket_maker,
        path_checker,
        confinement,
    });
    left_out
        .into_iter()
        .for_each(|disk| worker_context.leave_out(disk));
    let managed = Manager::new(worker_context.clone(), room, specs.process.clone());
    if worker_context.options.daemon.is_some() {
        reload_on_hangup(stop, &managed)?;
    }
    let daemon = Arc::new(ServedApi::new(managed.clone()));
    let control = control.map(|socket| socket.start(daemon)).transpose()?;
    let _metrics = metrics
        .map(|socket| socket.start(&worker_context.registry))
        .transpose()?;
    let served = serve_opened(
        loads,
        disks,
        control,
        manager,
        stop,
        &managed,
        &worker_context,
    );
    if served.is_ok() || stop.is_ordered() {
        managed.end_unavailable();
    }
    keeper.end();
    served
}

/// Proof that the sandbox is complete and all threads serve their disks.
pub(crate) struct Serving(());

/// Threads that serve disks, of which the first are the workers.
struct Threads<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    worker_context: &'env WorkerContext,
    stop: &'env StopSignal,
    ends: &'env ThreadResults,
    watch: Watch,
    count: usize,
}

impl<'scope, 'env> Threads<'scope, 'env> {
    /// Starts the workers, and waits until they have opened what they need.
    fn start_workers(&mut self, loads: Vec<Load>) -> Result<()> {
        let (worker_context, workers) = (self.worker_context, loads.len());
        let cpus = &worker_context.options.cpus;
        let (started, starts) = mpsc::channel();
        for (i, load) in loads.into_iter().enumerate() {
            let (descriptor, started) = (self.stop.descriptor()?, started.clone());
            let cpu = (!cpus.is_empty())
                .then(|| cpus.get(i % cpus.len()).copied())
                .flatten();
            let run = move || {
                // Deadlines of limits and weights are some microseconds away: the system may not
                // add fifty to each.
                if let Err(error) = set_current_timer_slack(NonZeroU64::new(TIMER_SLACK)) {
                    tracing::debug!(%error, "timers stay as late as they are");
                }
                // Jobs posted to a worker that could not start are not waited for.
                let _close = OnDrop(|| {
                    worker_context
                        .peers
                        .handle(i)
                        .into_iter()
                        .for_each(Handle::close)
                });
                match cpu.map_or(Ok(()), pin) {
                    Ok(()) => run_worker(i, load, descriptor, worker_context, &started),
                    Err(error) => go(Err::<(), _>(error), &started, Ok),
                }
            };
            let thread = self.spawn(format!("worker-{i}"), run);
            thread.context("worker thread")?;
        }
        drop(started);
        self.all_started(&starts, workers)
    }

    /// Starts the thread of block devices, if there may be any. Their queues need running workers,
    /// and the sealed sandbox permits the system calls that make them.
    fn start_disks(&mut self, disks: Vec<OpenDisk>, _: Sealed) -> Result<Serving> {
        let worker_context = self.worker_context;
        if !disks.is_empty() || worker_context.confinement.has_ublk() {
            let (started, starts) = mpsc::channel();
            let descriptor = self.stop.descriptor()?;
            let run = move || run_disks(disks, descriptor, worker_context, &started);
            let thread = self.spawn("ublk".into(), run);
            thread.context("ublk thread")?;
            self.all_started(&starts, 1)?;
        }
        Ok(Serving(()))
    }

    /// Starts a thread. If it fails or panics, all others are to end in order: queues of their
    /// controllers may be there.
    fn spawn(
        &mut self,
        name: String,
        run: impl FnOnce() -> Result<()> + Send + 'scope,
    ) -> Result<()> {
        let stop = self.stop;
        let run = move || -> Result<()> {
            let end = OnDrop(|| stop.now());
            run()?;
            std::mem::forget(end);
            Ok(())
        };
        let run = self.ends.thread(self.count, run);
        let builder = std::thread::Builder::new().name(name);
        let thread = builder.spawn_scoped(self.scope, run);
        thread.inspect_err(|_| stop.now())?;
        self.count += 1;
        Ok(())
    }

    /// Waits until `count` threads have reported their start. A thread that cannot start ends all
    /// of them. An order to end is obeyed at once.
    fn all_started(&mut self, starts: &mpsc::Receiver<Result<()>>, count: usize) -> Result<()> {
        let mut result = Ok(());
        let mut starting = count;
        while starting > 0 {
            match starts.recv_timeout(START_LOOK) {
                Ok(start) => {
                    starting -= 1;
                    if start.is_err() && result.is_ok() {
                        result = start;
                        self.stop.now();
                    }
                }
                Err(RecvTimeoutError::Timeout) if self.stop.is_ordered() => break,
                Err(RecvTimeoutError::Timeout) => self.watch.look(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        result
    }
}

/// Starts all threads that serve disks, and waits for their end.
fn serve_opened(
    loads: Vec<Load>,
    disks: Vec<OpenDisk>,
    mut control: Option<control::server::RunningServer>,
    mut manager: ServiceManager,
    stop: &StopSignal,
    managed: &Arc<Manager>,
    worker_context: &WorkerContext,
) -> Result<()> {
    let keeper = &worker_context.opener.keeper;
    let workers = loads.len();
    let ends = &ThreadResults::new();
    std::thread::scope(|scope| {
        // Also where a thread cannot be started: no other thread waits for one that has failed, and
        // no client for a start that has.
        let _end = OnDrop(|| stop.now());
        let _release = OnDrop(|| worker_context.confinement.release());
        let complete = OnDrop(|| worker_context.table.complete());
        let mut threads = Threads {
            scope,
            worker_context,
            stop,
            ends,
            watch: Watch::new(&worker_context.peers),
            count: 0,
        };
        let started = threads.start_workers(loads);
        let sealed = started.and(worker_context.confinement.seal());
        let serving = sealed.and_then(|sealed| threads.start_disks(disks, sealed));
        match &serving {
            Ok(serving) => {
                manager.ready(serving);
                keeper.say_served(serving);
                managed.retry_unavailable(serving);
            }
            Err(error) if keeper.is_followed() => shutdown::exit_followed(error, keeper),
            Err(_) => stop.now(),
        }
        // An upgrade that begins now has the unavailable disks in its record.
        drop(complete);
        // Until the end: a thread that fails asks for it, too.
        let Threads {
            mut watch, count, ..
        } = threads;
        let sizes = &worker_context.sizes;
        sizes.run(&stop.descriptor()?, || {
            watch.look();
            worker_context.registry.look();
            worker_context.heap.look();
            keeper.look();
            managed.end_exports_handed_over();
            if sizes.have_changed() {
                managed.refresh_records();
            }
            manager.alive(|interval| !watch.all_stuck(interval));
        });
        manager.stopping();
        managed.close_exports();
        worker_context.receiver.shut();
        let limit = worker_context.options.polling.stop_timeout;
        match ends.wait(count, workers, limit, || stop.now(), &mut watch) {
            Ok(end) => {
                sizes.end();
                serving.and(end)
            }
            // Threads are left that the scope would wait for.
            Err(left) => {
                drop(control.take());
                // Files of ended workers are free for other processes.
                sizes.end();
                if let Err(error) = &serving {
                    tracing::error!(error = format_args!("{error:#}"), "start-up failed");
                }
                keeper.end();
                shutdown::exit(&left)
            }
        }
    })
}
