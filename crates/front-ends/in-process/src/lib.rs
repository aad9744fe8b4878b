//! A controller in this process, for tests, benchmarks and programs that embed one.
//!
//! [`local`] runs the controller in the calling thread: it makes progress only while the driver
//! waits for it ([`Transport::pause`]), so every run behaves the same. [`spawn`] runs it in a
//! separate thread. In both cases a [`Worker`] serves it, with the loop that all processes use.
//! [`InProcess::with`] gives access to the controller itself.
//!
//! *Scope.* The controller's own interface, and the driver's transports. Sockets, and a loop of its
//! own, are out of scope. There is no unsafe code.
//!
//! # Example
//!
//! ```
//! use driver::{Device, Op, Options, QueueOptions, Request};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = in_process::memory_disk(16 << 20)?; // or `local(Host::new(controller, io)?)`
//! let device = Device::open(disk.clone(), Options::default())?;
//! let mut queue = device.queue(1, QueueOptions::default())?;
//! let flush = Request { op: Op::Flush, lba: 0, blocks: 0, buffer: None, user_data: 1 };
//! queue.execute(flush)?;
//!
//! // The other side, to look at or to disturb.
//! assert!(disk.with(|host| host.controller().is_ready())?);
//! # Ok(()) }
//! ```
#![forbid(unsafe_code)]

mod local;

pub use local::Local;

use controller::{Controller, ControllerConfig, IrqSink, NamespaceConfig, pci};
use dma::SharedPages;
use driver::transport::{
    DmaLimits, DoorbellCell, Mapping, Source, Transport, TransportError, mapped_whole,
};
use nvme::pci::command;
use ref_cast::RefCast;
use std::cell::RefCell;
use std::convert::Infallible;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use volume::{Io, IoOptions, MemVolume};
use worker::{Handle, IdleWindow, Options, Worker};

/// Front-end number of the controller on its worker, which serves nothing else.
const OWNER: u16 = 0;

/// A controller and its worker, owned by one thread.
#[derive(RefCast)]
#[repr(transparent)]
pub struct Host(Worker<Local>);

impl Host {
    /// Creates the host of a controller with the ID 0 and with volumes that were opened on `io`.
    ///
    /// # Errors
    /// [`TransportError::Io`] when no file descriptor is available.
    pub fn new(controller: Controller, io: Io) -> Result<Self, TransportError> {
        Self::with_idle_window(controller, io, IdleWindow::default())
    }

    /// Creates the host of a controller, as [`Host::new`] does. After the last work, its worker
    /// polls for the idle window before it sleeps.
    ///
    /// # Errors
    /// [`TransportError::Io`] when no file descriptor is available.
    pub fn with_idle_window(
        controller: Controller,
        io: Io,
        idle_window: IdleWindow,
    ) -> Result<Self, TransportError> {
        let handle = Handle::new().map_err(system)?;
        let options = Options {
            idle_window,
            shares_cpu: true,
            ..Options::default()
        };
        let mut worker = Worker::new(Rc::new(io), &handle, options).map_err(system)?;
        match worker.add(|_| Ok::<_, Infallible>(Local(controller))) {
            Ok(_) => Ok(Self(worker)),
            Err(never) => match never {},
        }
    }

    /// Returns the controller for changes.
    pub fn controller(&mut self) -> &mut Controller {
        match self.0.front_mut(OWNER) {
            Some(Local(controller)) => controller,
            None => unreachable!("it is never removed"),
        }
    }

    /// Returns the controller for inspection.
    pub fn controller_ref(&self) -> &Controller {
        match self.0.front(OWNER) {
            Some(Local(controller)) => controller,
            None => unreachable!("it is never removed"),
        }
    }

    /// Runs one round of the loop: fetch, execute, complete. Returns whether there was work.
    #[inline(never)]
    pub fn step(&mut self) -> bool {
        self.0.step()
    }

    /// Runs rounds of the loop until `over` returns true, for ten seconds at most.
    fn settle(&mut self, over: impl Fn(&mut Controller) -> bool) -> bool {
        let limit = Instant::now() + Duration::from_secs(10);
        loop {
            if over(self.controller()) {
                return true;
            }
            if !self.step() && Instant::now() >= limit {
                return false;
            }
        }
    }
}

fn system(error: worker::Error<Infallible>) -> TransportError {
    TransportError::io("a worker", std::io::Error::other(error))
}

thread_local! {
    /// Hosts of this thread by their numbers. Usually there is one, and every step looks it up.
    static HOSTS: RefCell<Vec<(u64, Host)>> = const { RefCell::new(Vec::new()) };
}

static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
enum Execution {
    /// The controller runs in the thread that created it, under this number.
    Here(u64),
    Thread {
        handle: Handle<Local>,
        thread: Mutex<Option<JoinHandle<()>>>,
    },
}

/// Transport of the NVMe driver to a controller in the same process.
#[derive(Debug)]
pub struct InProcess {
    execution: Execution,
    pages: SharedPages,
    /// Doorbells are stores, because the controller polls the page.
    mapped_doorbells: bool,
    vectors: u16,
}

/// Runs a controller in the calling thread. Calls from other threads fail with
/// [`TransportError::Gone`].
pub fn local(host: Host) -> Arc<InProcess> {
    let key = NEXT.fetch_add(1, Ordering::Relaxed);
    let made = InProcess {
        pages: (**host.controller_ref().bar0_pages()).clone(),
        mapped_doorbells: host.controller_ref().config().mapped_doorbells,
        vectors: host.controller_ref().vectors(),
        execution: Execution::Here(key),
    };
    HOSTS.with_borrow_mut(|hosts| hosts.push((key, host)));
    Arc::new(made)
}

/// Runs a controller in a new thread, until the transport is dropped. `make` creates its host
/// there.
///
/// # Errors
/// The error that `make` returns.
pub fn spawn<E: Send + 'static>(
    make: impl FnOnce() -> Result<Host, E> + Send + 'static,
) -> Result<Arc<InProcess>, E> {
    let (told, tell) = channel();
    let thread = std::thread::spawn(move || match make() {
        Ok(mut host) => {
            let about = (
                host.0.handle().clone(),
                (**host.controller_ref().bar0_pages()).clone(),
                host.controller_ref().config().mapped_doorbells,
                host.controller_ref().vectors(),
            );
            if told.send(Ok(about)).is_ok()
                && let Err(error) = host.0.serve()
            {
                // Callers that wait for an answer are notified that the thread has ended.
                eprintln!("the controller's thread has ended: {error}");
            }
        }
        Err(error) => drop(told.send(Err(error))),
    });
    let (handle, pages, mapped_doorbells, vectors) = match tell.recv() {
        Ok(about) => about?,
        // The thread panicked while creating the controller; the panic continues here.
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => std::process::abort(),
        },
    };
    Ok(Arc::new(InProcess {
        execution: Execution::Thread {
            handle,
            thread: Mutex::new(Some(thread)),
        },
        pages,
        mapped_doorbells,
        vectors,
    }))
}

/// Creates a controller in the calling thread with one namespace of 512-byte blocks in memory, for
/// examples and tests.
///
/// # Errors
/// [`TransportError::Io`] when the memory cannot be allocated.
pub fn memory_disk(size: u64) -> Result<Arc<InProcess>, TransportError> {
    let failed = |error: &dyn std::error::Error| {
        TransportError::io("memory disk", std::io::Error::other(error.to_string()))
    };
    let volume = MemVolume::new(size).map_err(|error| failed(&error))?;
    let namespace = NamespaceConfig::new(1, Arc::new(volume))
        .with_nguid([1; 16])
        .with_eui64([1; 8]);
    let io = Io::new(IoOptions::default());
    let config = ControllerConfig::default();
    let controller = Controller::new(0, config, vec![namespace], &io);
    let controller = controller.map_err(|error| failed(&error))?;
    Ok(local(Host::new(controller, io)?))
}

impl InProcess {
    /// Runs a function on the controller, in its thread, and waits for the result.
    ///
    /// # Errors
    /// [`TransportError::Gone`] from another thread than a [`local`] controller's, or
    /// when its thread has ended.
    pub fn with<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Host) -> R + Send + 'static,
    ) -> Result<R, TransportError> {
        match &self.execution {
            Execution::Here(key) => here(*key, act),
            Execution::Thread { handle, .. } => {
                let (tell, told) = channel();
                handle.post(move |worker| drop(tell.send(act(Host::ref_cast_mut(worker)))));
                told.recv().map_err(|_| ended())
            }
        }
    }

    /// Runs a function on the controller as [`InProcess::with`] does, without waiting for it: the
    /// way to deliver writes of doorbells.
    ///
    /// # Errors
    /// As [`InProcess::with`].
    pub fn post(&self, act: impl FnOnce(&mut Host) + Send + 'static) -> Result<(), TransportError> {
        match &self.execution {
            Execution::Here(key) => here(*key, act),
            Execution::Thread { handle, .. } => {
                let posted = handle.post(move |worker| act(Host::ref_cast_mut(worker)));
                posted.then_some(()).ok_or_else(ended)
            }
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

fn ended() -> TransportError {
    TransportError::Gone("the controller's thread has ended".into())
}

impl Drop for InProcess {
    fn drop(&mut self) {
        match &mut self.execution {
            Execution::Here(key) => {
                // If thread-locals are already destroyed, so is the controller.
                let _ = HOSTS.try_with(|hosts| {
                    let mut hosts = hosts.borrow_mut();
                    let at = hosts.iter().position(|(of, _)| of == key);
                    let host = at.map(|at| hosts.swap_remove(at));
                    drop(hosts);
                    drop(host);
                });
            }
            Execution::Thread { handle, thread } => {
                handle.post(|worker| worker.stop());
                let thread = thread.get_mut().unpoisoned();
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
        }
    }
}

/// An eventfd that receives an interrupt.
struct Signal(OwnedFd);

impl IrqSink for Signal {
    fn signal(&self) {
        // A full counter means that it is already signalled.
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
            host.controller().bar0_read(offset, &mut bytes);
            u32::from_le_bytes(bytes)
        })
    }

    fn write32(&self, offset: u64, value: u32) -> Result<(), TransportError> {
        self.post(move |host| host.controller().bar0_write(offset, &value.to_le_bytes()))
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
        self.with(move |host| host.controller().dma_map(iova, len, backing, prot))?
            .map_err(TransportError::from)
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<(), TransportError> {
        let (unmapped, quiet) = self.with(move |host| {
            let unmapped = host.controller().dma_unmap(iova, len)?;
            Ok::<_, dma::MapError>((unmapped, host.settle(Controller::dma_quiesced)))
        })??;
        if quiet {
            mapped_whole(unmapped, len)
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
                host.controller().set_msix(vector, sinks.next().flatten());
            }
        })
    }

    fn set_vector(
        &self,
        vector: u16,
        eventfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), TransportError> {
        let sink = sink(eventfd)?;
        self.with(move |host| host.controller().set_msix(vector, sink))
    }

    fn set_bus_master(&self, enable: bool) -> Result<(), TransportError> {
        let settled = self.with(move |host| {
            let mut bytes = [0; 2];
            let at = nvme::pci::COMMAND as u64;
            host.controller().config_read(at, &mut bytes);
            let mut command = u16::from_le_bytes(bytes);
            command |= command::MEMORY_SPACE | command::INTERRUPT_DISABLE;
            if enable {
                command |= command::BUS_MASTER
            } else {
                command &= !command::BUS_MASTER
            }
            host.controller().config_write(at, &command.to_le_bytes());
            host.settle(Controller::config_settled)
        })?;
        if settled {
            Ok(())
        } else {
            Err(TransportError::Unsupported(
                "bus mastering under endless commands",
            ))
        }
    }

    fn reset(&self) -> Result<(), TransportError> {
        let over = self.with(|host| {
            host.controller().reset();
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
        match &self.execution {
            Execution::Here(key) => HOSTS.with_borrow_mut(|hosts| {
                if let Some(host) = find(hosts, *key) {
                    host.step();
                }
            }),
            Execution::Thread { .. } => std::hint::spin_loop(),
        }
    }

    fn is_stepped(&self) -> bool {
        matches!(self.execution, Execution::Here(_))
    }
}
