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
use crate::confine::Confinement;
use crate::confine::descriptors::limit_clients;
use crate::confine::inherited;
use crate::confine::path_check::check_at_start;
use crate::confine::receiver;
use crate::confine::socket_maker::Grants;
use crate::front::kind::{AddedFrontend, RingUse, Seat, front_end};
use crate::front::ublk::{Disks, OpenDisk};
use crate::front::{Front, Handle, Worker};
use crate::keep::{self, PreviousConfiguration};
use crate::manage::{DiskServer, DiskTable, Manager, ServedDisk};
use crate::open::Opener;
use crate::open::prepare::{
    Load, Open, UnavailableDisk, by_nsid, make_room_for_all, not_served, open_all,
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
        if needs_ring && keep::is_successor() {
            return Err(error).context(format!("worker {index}"));
        }
        tracing::warn!(worker = index, %error, "queues of files cannot migrate to this worker");
    }
    let options = worker::Options {
        idle_window: options.polling.idle_window,
        shares_cpu: options.cpus.is_empty(),
        stop: Some(stop),
    };
    let mut worker = Worker::new(io, handle, options)?;
    for (disk, open) in load.0 {
        let _attempt = keep::Attempt::new(&disk.name());
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
        Err(error) => Err(not_served(&spec.name(), error)),
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

/// Guard that closes a worker's handle: jobs posted to a worker that could not start are not waited
/// for.
struct Close<'a>(Option<&'a Handle>);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        if let Some(handle) = self.0 {
            handle.close();
        }
    }
}

/// Ends all threads when it is dropped: they are not left waiting for one that has failed.
struct EndAll<'a>(&'a StopSignal);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        self.0.now();
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
pub fn serve(specs: &Specs, options: &ServeOptions) -> Result<()> {
    keep::name_process();
    let served = serve_all(specs, options);
    if let Err(error) = &served {
        keep::tell_failure(error);
    }
    served
}

fn serve_all(specs: &Specs, options: &ServeOptions) -> Result<()> {
    let specs = &named(specs, options)?;
    keep::begin(specs, options)?;
    keep::begin_attempts(keep::is_replacement());
    let mut options = options.clone();
    options.previous.taken_over = keep::is_successor();
    let place = ControlPlace::new(options.control.as_deref());
    options.control.clone_from(&place.path);
    let kept = options.daemon.iter().flat_map(|daemon| &daemon.kept);
    let all = DiskSpec::all(specs);
    check_at_start(all.iter().chain(kept), &options, |name| {
        !options.may_be_unavailable(name)
    });
    check(specs, options.control.as_deref())?;
    if options.daemon.is_none() {
        check_filled(specs)?;
    }
    if !keep::is_noted() {
        let process = &specs.process;
        let disks = DiskSpec::all(specs);
        let now = match &options.daemon {
            Some(daemon) => PreviousConfiguration {
                file: daemon.file.clone(),
                ..PreviousConfiguration::new(
                    disks.iter(),
                    process,
                    daemon.kept.clone(),
                    &daemon.process,
                )
            },
            None => PreviousConfiguration::new(disks.iter(), process, Vec::new(), process),
        };
        keep::note_first(&now).context("keeper")?;
    }
    let (kept, left_out) = options.kept_beside(specs);
    for unserved in &left_out {
        let name = unserved.disk.name();
        if !options.may_be_left_out(&name) {
            return Err(not_served(&name, anyhow!("{}", unserved.why)));
        }
    }
    let specs = &{
        let mut specs = specs.clone();
        specs.extend(kept);
        specs
    };
    keep::expect_disks(specs.controllers.len());
    let workers = workers(specs, &options);
    check_cpus(&options.cpus, workers)?;
    warn_of_few_cpus(workers, &options.cpus);
    let grows = options.daemon.is_some();
    let room = limit_clients(specs, workers, grows, &mut options.clients);
    // The receiver process starts first: it must not have any thread's CPU affinity, nor
    // descriptors that are opened later.
    let grants = Grants::new(&options, &specs.process.access, &DiskSpec::all(specs));
    let (receiver, socket_maker, path_checker) = receiver::start(options.sandbox, grants)?;
    keep::tell_receiver(&receiver)?;
    keep::die_of_panics();
    let stop = &StopSignal::on_signals(options.sandbox)?;
    let handles = (0..workers).map(|_| Handle::new());
    let peers = Arc::new(Peers::new(handles.collect::<Result<_, _>>()?));
    let registry = Registry::new(specs, &peers);
    registry.settings.set(options.settings.clone());
    let opener = Opener::new(&registry, &options);
    for disk in DiskSpec::all(specs) {
        if keep::was_served(&disk, &options.unavailable) {
            opener.records.enter_continued(&disk);
        }
    }
    // All that has a path is opened before the sandbox is entered.
    let manager = ServiceManager::from_environment();
    make_room_for_all(specs, &options)?;
    let mut control = ControlSocket::listen(
        &place,
        options.control_group.as_ref(),
        options.clients.connects,
        &receiver,
    )?;
    let metrics = options.metrics.map(MetricsListener::bind).transpose()?;
    let end = (stop, options.polling.stop_timeout);
    let clean_up = || drop(control.take());
    let open = open_all(specs, workers, &opener, &receiver, &options, end, clean_up);
    let Open {
        loads,
        disks,
        unserved,
    } = open?;
    inherited::warn_of_others();
    let left_out: Vec<UnavailableDisk> = left_out.into_iter().chain(unserved).collect();
    let unavailable: Vec<DiskSpec> = left_out.iter().map(|one| one.disk.clone()).collect();
    keep::discard_rest(&unavailable);
    let confinement = Confinement::new(specs, &options, &unavailable);
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
        table: Arc::new(DiskTable::new(options.control.clone())),
        disks: Disks::new()?,
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
    keep::outlive_keeper()?;
    worker_context.confinement.enter()?;
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
    keep::end();
    served
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
    let cpus = &worker_context.options.cpus;
    let workers = loads.len();
    let ends = &ThreadResults::new();
    let mut watch = Watch::new(&worker_context.peers);
    std::thread::scope(|scope| {
        // Also where a thread cannot be started.
        let _end = EndAll(stop);
        let _release = Release(&worker_context.confinement);
        let complete = Complete(&worker_context.table);
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
                // If this worker fails or panics, all others are to end in order: queues of their
                // controllers may be here.
                let end = EndAll(stop);
                let _close = Close(worker_context.peers.handle(i));
                match cpu.map_or(Ok(()), pin) {
                    Ok(()) => run_worker(i, load, descriptor, worker_context, &started),
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
        // The queues of block devices need running workers. The sandbox permits the system calls
        // that make them.
        result = result.and(worker_context.confinement.seal());
        let mut threads = workers;
        if (!disks.is_empty() || worker_context.confinement.has_ublk()) && result.is_ok() {
            let (started, starts) = mpsc::channel();
            let (descriptor, tell) = (stop.descriptor()?, ends.tell(threads));
            let run = move || -> Result<()> {
                let end = EndAll(stop);
                run_disks(disks, descriptor, worker_context, &started)?;
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
            Ok(()) => {
                manager.ready();
                keep::say_served();
                managed.retry_unavailable();
            }
            Err(error) if keep::is_followed() => shutdown::exit_followed(error),
            Err(_) => stop.now(),
        }
        // An upgrade that begins now has the unavailable disks in its record.
        drop(complete);
        // Until the end: a thread that fails asks for it, too.
        let sizes = &worker_context.sizes;
        sizes.run(&stop.descriptor()?, || {
            watch.look();
            worker_context.registry.look();
            worker_context.heap.look();
            keep::look();
            if sizes.have_changed() {
                managed.refresh_records();
            }
            manager.alive(|interval| !watch.all_stuck(interval));
        });
        manager.stopping();
        worker_context.receiver.shut();
        let limit = worker_context.options.polling.stop_timeout;
        match ends.wait(threads, workers, limit, || stop.now(), &mut watch) {
            Ok(end) => {
                sizes.end();
                result.and(end)
            }
            // Threads are left that the scope would wait for.
            Err(left) => {
                drop(control.take());
                // Files of ended workers are free for other processes.
                sizes.end();
                if let Err(error) = &result {
                    tracing::error!(error = format_args!("{error:#}"), "start-up failed");
                }
                keep::end();
                shutdown::exit(&left)
            }
        }
    })
}

/// Waits until `count` threads have reported their start. A thread that cannot start ends all of
/// them. An order to end is obeyed at once.
fn all_started(
    starts: &mpsc::Receiver<Result<()>>,
    count: usize,
    stop: &StopSignal,
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

/// Guard that marks the table of disks as complete, so that clients do not wait for a start that
/// has failed.
struct Complete<'a>(&'a DiskTable);

impl Drop for Complete<'_> {
    fn drop(&mut self) {
        self.0.complete();
    }
}
