//! A controller in this very process: for tests, benchmarks and programs that embed one.
//!
//! [`local`] keeps the controller in the calling thread: it works only while the driver waits for it
//! ([`Transport::pause`]), so what happens is the same in every run. [`spawn`] gives it a thread of its own, which polls
//! while there is work. Either way the controller itself is reached with [`InProcess::with`].

use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use controller::{Controller, ControllerConfig, IrqSink, NamespaceConfig, pci};
use dma::SharedPages;
use nvme::pci::command;
use volume::{Io, IoOptions, MemVolume};

use crate::transport::{DmaLimits, DoorbellCell, Mapping, Source, Transport, TransportError};

/// Rounds without work after which a controller's thread looks for messages, and then rests.
const RESTLESS: u32 = 4096;

/// Steps between two looks at the clock, as a worker does it.
const STEPS_PER_CLOCK: u32 = 16;

/// A controller and the ring of its volumes, in the hands of one thread.
pub struct Host {
    controller: Controller,
    io: Io,
    completions: Vec<volume::Completion>,
    /// As of the last look at the clock.
    now: Instant,
    steps: u32,
}

impl Host {
    /// A controller whose volumes were opened on `io`.
    pub fn new(controller: Controller, io: Io) -> Self {
        Self {
            controller,
            io,
            completions: Vec::new(),
            now: Instant::now(),
            steps: 0,
        }
    }

    /// The controller.
    pub fn controller(&mut self) -> &mut Controller {
        &mut self.controller
    }

    /// The controller, to look at.
    pub fn controller_ref(&self) -> &Controller {
        &self.controller
    }

    /// One round: fetch, execute, complete. Whether there was anything to do.
    pub fn step(&mut self) -> bool {
        if self.steps.is_multiple_of(STEPS_PER_CLOCK) {
            self.now = Instant::now();
        }
        self.steps = self.steps.wrapping_add(1);
        let mut worked = self.controller.poll(self.now);
        self.io.flush();
        let completions = &mut self.completions;
        self.io.poll(&mut |completion| completions.push(completion));
        self.controller.poll_volumes(completions);
        worked |= !completions.is_empty();
        for completion in completions.drain(..) {
            self.controller.complete(completion);
        }
        worked
    }

    /// Steps until `over`, or for ten seconds.
    fn settle(&mut self, over: impl Fn(&mut Controller) -> bool) -> bool {
        let limit = Instant::now() + Duration::from_secs(10);
        loop {
            if over(&mut self.controller) {
                return true;
            }
            if !self.step() && Instant::now() >= limit {
                return false;
            }
        }
    }
}

type Job = Box<dyn FnOnce(&mut Host) + Send>;

thread_local! {
    /// By their numbers. One, mostly: looking for it is a part of every step.
    static HOSTS: RefCell<Vec<(u64, Host)>> = const { RefCell::new(Vec::new()) };
}

static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
enum Place {
    /// In the thread that made it, under this number.
    Here(u64),
    Thread {
        /// None only inside `drop`.
        jobs: Mutex<Option<Sender<Job>>>,
        thread: Mutex<Option<JoinHandle<()>>>,
    },
}

/// The transport to a controller in this process.
#[derive(Debug)]
pub struct InProcess {
    place: Place,
    pages: SharedPages,
    /// Doorbells are stores, because the controller polls the page.
    mapped_doorbells: bool,
    vectors: u16,
}

/// Keeps a controller in the calling thread. From other threads everything fails as gone.
pub fn local(host: Host) -> Arc<InProcess> {
    let key = NEXT.fetch_add(1, Ordering::Relaxed);
    let made = InProcess {
        pages: (**host.controller.bar0_pages()).clone(),
        mapped_doorbells: host.controller.config().mapped_doorbells,
        vectors: host.controller.vectors(),
        place: Place::Here(key),
    };
    HOSTS.with_borrow_mut(|hosts| hosts.push((key, host)));
    Arc::new(made)
}

/// Makes a controller in a thread of its own, which serves it until the transport is dropped.
///
/// # Errors
/// What `make` says.
pub fn spawn<E: Send + 'static>(
    make: impl FnOnce() -> Result<Host, E> + Send + 'static,
) -> Result<Arc<InProcess>, E> {
    let (jobs, inbox) = channel();
    let (told, tell) = channel();
    let thread = std::thread::spawn(move || match make() {
        Ok(host) => {
            let about = (
                (**host.controller.bar0_pages()).clone(),
                host.controller.config().mapped_doorbells,
                host.controller.vectors(),
            );
            if told.send(Ok(about)).is_ok() {
                serve(host, &inbox);
            }
        }
        Err(error) => drop(told.send(Err(error))),
    });
    let (pages, mapped_doorbells, vectors) = match tell.recv() {
        Ok(about) => about?,
        // The thread died while making the controller; let its panic go on here.
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => std::process::abort(),
        },
    };
    Ok(Arc::new(InProcess {
        place: Place::Thread {
            jobs: Mutex::new(Some(jobs)),
            thread: Mutex::new(Some(thread)),
        },
        pages,
        mapped_doorbells,
        vectors,
    }))
}

/// A controller in the calling thread with one namespace of 512-byte blocks in memory: for examples.
///
/// # Errors
/// [`TransportError::Io`] when there is no memory for it.
pub fn memory_disk(size: u64) -> Result<Arc<InProcess>, TransportError> {
    let failed = |error: &dyn std::error::Error| {
        TransportError::io("memory disk", std::io::Error::other(error.to_string()))
    };
    let volume = MemVolume::new(size).map_err(|error| failed(&error))?;
    let namespace = NamespaceConfig {
        nsid: 1,
        volume: Arc::new(volume),
        block_size: 512,
        read_only: false,
        nguid: [1; 16],
        eui64: [1; 8],
    };
    let io = Io::new(IoOptions::default());
    let config = ControllerConfig::default();
    let controller = Controller::new(0, config, vec![namespace], &io);
    let controller = controller.map_err(|error| failed(&error))?;
    Ok(local(Host::new(controller, io)))
}

fn serve(mut host: Host, inbox: &Receiver<Job>) {
    let mut idle = 0u32;
    loop {
        let worked = host.step();
        idle = if worked { 0 } else { idle.saturating_add(1) };
        if worked && !idle.is_multiple_of(64) {
            continue;
        }
        match inbox.try_recv() {
            Ok(job) => {
                job(&mut host);
                idle = 0;
                continue;
            }
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {}
        }
        if idle < RESTLESS {
            std::hint::spin_loop();
            continue;
        }
        let must_poll =
            host.controller.needs_polling() || host.controller.is_busy() || host.io.in_flight() > 0;
        if must_poll {
            // Nothing wakes this thread: other threads may run, but not for long.
            std::thread::yield_now();
            continue;
        }
        if host.controller.arm() {
            continue;
        }
        // A doorbell comes as a job. The limit is for hosts without a barrier, and for time-outs of the controller's own.
        match inbox.recv_timeout(Duration::from_millis(1)) {
            Ok(job) => {
                job(&mut host);
                idle = 0;
            }
            Err(RecvTimeoutError::Timeout) => {
                if host.controller.recheck() {
                    idle = 0;
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl InProcess {
    /// Does something with the controller, in its thread, and waits for it.
    ///
    /// # Errors
    /// [`TransportError::Gone`] from another thread than a [`local`] controller's, or when its thread has ended.
    pub fn with<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Host) -> R + Send + 'static,
    ) -> Result<R, TransportError> {
        match &self.place {
            Place::Here(key) => here(*key, act),
            Place::Thread { jobs, .. } => {
                let (tell, told) = channel();
                send(jobs, Box::new(move |host| drop(tell.send(act(host)))))?;
                told.recv().map_err(|_| ended())
            }
        }
    }

    /// As [`InProcess::with`], without waiting.
    fn post(&self, act: impl FnOnce(&mut Host) + Send + 'static) -> Result<(), TransportError> {
        match &self.place {
            Place::Here(key) => here(*key, act),
            Place::Thread { jobs, .. } => send(jobs, Box::new(act)),
        }
    }
}

#[inline]
fn find(hosts: &mut [(u64, Host)], key: u64) -> Option<&mut Host> {
    let found = hosts.iter_mut().find(|(of, _)| *of == key);
    found.map(|(_, host)| host)
}

fn here<R>(key: u64, act: impl FnOnce(&mut Host) -> R) -> Result<R, TransportError> {
    HOSTS.with_borrow_mut(|hosts| match find(hosts, key) {
        Some(host) => Ok(act(host)),
        None => {
            let why = "the controller lives in another thread";
            Err(TransportError::Gone(why.into()))
        }
    })
}

fn send(jobs: &Mutex<Option<Sender<Job>>>, job: Job) -> Result<(), TransportError> {
    let jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
    let sent = jobs.as_ref().map(|jobs| jobs.send(job));
    match sent {
        Some(Ok(())) => Ok(()),
        _ => Err(ended()),
    }
}

fn ended() -> TransportError {
    TransportError::Gone("the controller's thread has ended".into())
}

impl Drop for InProcess {
    fn drop(&mut self) {
        match &mut self.place {
            Place::Here(key) => {
                // When thread-locals are gone already, so is the controller.
                let _ = HOSTS.try_with(|hosts| {
                    let mut hosts = hosts.borrow_mut();
                    let at = hosts.iter().position(|(of, _)| of == key);
                    let host = at.map(|at| hosts.swap_remove(at));
                    drop(hosts);
                    drop(host);
                });
            }
            Place::Thread { jobs, thread } => {
                *jobs.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
                let thread = thread.get_mut().unwrap_or_else(PoisonError::into_inner);
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
        }
    }
}

/// An eventfd as the receiver of an interrupt.
struct Signal(OwnedFd);

impl IrqSink for Signal {
    fn signal(&self) {
        // Full means that it is signalled already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

fn sink(eventfd: Option<BorrowedFd<'_>>) -> Result<Option<Arc<dyn IrqSink>>, TransportError> {
    let Some(fd) = eventfd else {
        return Ok(None);
    };
    let fd = fd.try_clone_to_owned();
    let fd = fd.map_err(|error| TransportError::io("eventfd", error))?;
    Ok(Some(Arc::new(Signal(fd))))
}

impl Transport for InProcess {
    fn read32(&self, offset: u64) -> Result<u32, TransportError> {
        self.with(move |host| {
            let mut bytes = [0; 4];
            host.controller.bar0_read(offset, &mut bytes);
            u32::from_le_bytes(bytes)
        })
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.post(move |host| host.controller.bar0_write(offset, &value.to_le_bytes()))
    }

    fn doorbell(&self, offset: u64) -> Option<DoorbellCell> {
        let index = usize::try_from(offset / 4).ok()?;
        if !self.mapped_doorbells || offset < pci::DOORBELL_OFFSET {
            return None;
        }
        DoorbellCell::shared(&self.pages, index)
    }

    fn dma_limits(&self) -> DmaLimits {
        DmaLimits {
            iova_ranges: vec![0..=(1 << 48) - 1],
            max_mappings: 65_535,
            page_size: 4096,
            host_ranges: false,
        }
    }

    fn map(&self, mapping: Mapping<'_>) -> Result<(), TransportError> {
        let Source::File { memory, offset } = mapping.source else {
            return Err(TransportError::NeedsSharedMemory);
        };
        let backing = Some((memory.clone(), offset));
        let (iova, len, prot) = (mapping.iova, mapping.len, mapping.prot);
        self.with(move |host| host.controller.dma_map(iova, len, backing, prot))?
            .map_err(TransportError::from)
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        let quiet = self.with(move |host| {
            host.controller.dma_unmap(iova, len)?;
            Ok::<_, dma::MapError>(host.settle(Controller::dma_quiesced))
        })??;
        if quiet {
            Ok(())
        } else {
            Err(TransportError::Unsupported(
                "an unmap under endless commands",
            ))
        }
    }

    fn msix_vectors(&self) -> u16 {
        self.vectors
    }

    fn set_msix(&self, eventfds: &[Option<BorrowedFd<'_>>]) -> Result<(), TransportError> {
        let mut sinks: Vec<Option<Arc<dyn IrqSink>>> = Vec::new();
        for fd in eventfds {
            sinks.push(sink(*fd)?);
        }
        let vectors = self.vectors;
        self.with(move |host| {
            let mut sinks = sinks.into_iter();
            for vector in 0..vectors {
                host.controller.set_msix(vector, sinks.next().flatten());
            }
        })
    }

    fn set_vector(
        &self,
        vector: u16,
        eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        let sink = sink(eventfd)?;
        self.with(move |host| host.controller.set_msix(vector, sink))
    }

    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError> {
        self.with(move |host| {
            let mut bytes = [0; 2];
            let at = nvme::pci::COMMAND as u64;
            host.controller.config_read(at, &mut bytes);
            let mut command = u16::from_le_bytes(bytes);
            command |= command::MEMORY_SPACE | command::INTERRUPT_DISABLE;
            match enable {
                true => command |= command::BUS_MASTER,
                false => command &= !command::BUS_MASTER,
            }
            host.controller.config_write(at, &command.to_le_bytes());
        })
    }

    fn reset(&self) -> Result<(), TransportError> {
        let over = self.with(|host| {
            host.controller.reset();
            host.settle(|controller| !controller.is_resetting())
        })?;
        if over {
            Ok(())
        } else {
            Err(TransportError::Unsupported(
                "a reset under endless commands",
            ))
        }
    }

    fn pause(&self) {
        match &self.place {
            Place::Here(key) => HOSTS.with_borrow_mut(|hosts| {
                if let Some(host) = find(hosts, *key) {
                    host.step();
                }
            }),
            Place::Thread { .. } => std::hint::spin_loop(),
        }
    }

    fn is_stepped(&self) -> bool {
        matches!(self.place, Place::Here(_))
    }
}
