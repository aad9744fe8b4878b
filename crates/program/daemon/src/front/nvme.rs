//! An NVMe controller behind a vfio-user socket.

use super::live::HandOver;
use super::survival::FrontSurvival;
use crate::front::device::NvmeDevice;
use crate::keep::Survival;
use crate::registry::counters::CountedDisk;
use crate::registry::guarded_list::ListEntry;
use crate::serve::balance::Balance;
use crate::serve::options::ClientLimits;
use crate::serve::peers::{Assignment, Peers};
use config::choices::Spread;
use control::EventSender;
use control::api::EventKind;
use controller::{Controller, ControllerStats, DoorbellPage};
use dma::MemoryCache;
use driver::NvmeVolume;
use probes::{LogLimit, LogLimits};
use receive::{AcceptedDescriptors, Intake, Receiver};
use rustix::io::Errno;
use rustix::net::UCred;
use std::convert::Infallible;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vfio_user::wire::MAX_MSG_FDS;
use vfio_user::{Connection, Interest, Listener};
use volume::{Budget, Completion, Io, PinPace};
use worker::{AcceptStats, Acceptor, Context, Descriptors, Frontend};

/// epoll token of the socket that the controller's clients connect to.
pub(super) const TOKEN_LISTENER: u32 = 0;
/// epoll token of the connected client's socket.
pub(super) const TOKEN_CLIENT: u32 = 1;
/// Minimum interval between two log lines about clients that cannot be accepted.
const ACCEPT_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// epoll token of the eventfd that becomes readable when a volume was resized.
const TOKEN_RESIZED: u32 = 2;
/// epoll token of the connection to the receiver process.
pub(super) const TOKEN_INTAKE: u32 = 3;
/// epoll token of the connection to the keeper.
pub(super) const TOKEN_KEEPER: u32 = 4;

/// Descriptors that a VMM may send: memory files and eventfds, but no sockets.
const WANTED: AcceptedDescriptors = AcceptedDescriptors {
    max_fds: MAX_MSG_FDS as u8,
    streams: false,
};

/// Makes the connection to the receiver process, which reads the messages of a controller's
/// clients.
pub fn intake(receiver: &Receiver) -> Intake {
    Intake::new(receiver, WANTED)
}

/// Controller with everything that is needed to serve it on a socket.
pub struct ServedController {
    pub controller: Controller,
    pub listener: Listener,
    /// Connection to the receiver process, which receives descriptors from clients.
    pub intake: Intake,
    /// NVMe devices of the volumes, which access guest memory directly.
    pub backends: Vec<Arc<NvmeVolume>>,
    /// Distribution of the controller's queues over workers.
    pub spread: Spread,
    /// Eventfd that becomes readable when a volume of the controller's namespaces was resized.
    pub resized: Arc<OwnedFd>,
    /// Limits for each client: memory and connections.
    pub limits: ClientLimits,
    /// Memory files that the client of a previous process has mapped.
    pub memories: MemoryCache,
    /// State that survives this process; `None` without a keeper.
    pub survival: Option<Survival>,
    /// Volume whose lock can be handed to another process, if there is one.
    pub hand_over: Option<HandOver>,
}

/// Front-end of an NVMe controller: the controller, its client, and its sockets.
pub struct NvmeFront {
    pub(super) device: NvmeDevice,
    balance: Balance,
    pub(super) acceptor: Acceptor<Listener>,
    /// Reader of clients' sockets. The field follows the listening socket, which must be closed
    /// first: the last to close it also closes clients that wait to be accepted.
    pub(super) intake: Intake,
    pub(super) descriptors: Descriptors,
    resized: Arc<OwnedFd>,
    /// io_uring of the worker, for volumes of namespaces that are attached later.
    io: Rc<Io>,
    pub(super) connection: Option<Connection>,
    /// Whether any client was connected since the doorbell page was created.
    pub(super) had_client: bool,
    /// Whether clients have to wait ([`NvmeFront::withhold`]).
    pub(super) withheld: bool,
    /// State that survives this process; `None` without a keeper.
    pub(super) survival: Option<FrontSurvival>,
    /// Events for which the client's socket is watched in the epoll set.
    pub(super) watched: Interest,
    /// Whether the last call has used up its budget, so that more messages may be waiting.
    pub(super) more: bool,
    /// For the log lines that clients cause by coming and going.
    pub(super) log: LogLimits,
    /// Limit for the log lines about refused clients. A separate limit, so that frequent other
    /// lines do not suppress them.
    pub(super) accept_log: LogLimit,
    /// Sender of events about connected and disconnected clients, and the disk's name in them.
    pub(super) events: Option<(EventSender, String)>,
    /// Registration of the controller's counters, which ends with this field.
    _entered: ListEntry<Arc<ControllerStats>>,
    kept: Option<(ListEntry<CountedDisk>, Assignment)>,
}

impl NvmeFront {
    /// Serves a controller on the worker of this number.
    ///
    /// # Errors
    /// The socket cannot be waited for, or the receiver process is not there.
    pub fn new(
        served: ServedController,
        context: &Context<'_>,
        worker: usize,
        peers: &Arc<Peers>,
    ) -> Result<Self, Errno> {
        let ServedController {
            mut controller,
            listener,
            mut intake,
            backends,
            spread,
            resized,
            limits,
            memories,
            survival,
            hand_over,
        } = served;
        let descriptors = context.descriptors.clone();
        let acceptor = Acceptor::new(
            listener,
            descriptors.clone(),
            TOKEN_LISTENER,
            limits.connects,
        )?;
        descriptors.add(&resized, TOKEN_RESIZED, worker::Interest::Readable)?;
        intake.connect(acceptor.listener().as_fd())?;
        if let Some(fd) = intake.fd() {
            descriptors.add(fd, TOKEN_INTAKE, worker::Interest::Readable)?;
        }
        if let Some(handle) = peers.handle(worker) {
            controller.set_worker(worker as u16, handle.waker());
        }
        let entered = peers.enter(controller.stats());
        let balance = Balance::new(spread, worker, peers.clone(), &controller);
        let mut device = NvmeDevice::new(
            controller,
            backends,
            limits,
            memories,
            context.waker.clone(),
            hand_over,
        );
        device.set_pinner(context.io.pinner());
        let (survival, left, waiting) = match survival.map(FrontSurvival::new) {
            Some((survival, left, waiting)) => (Some(survival), left, waiting),
            None => (None, None, None),
        };
        let mut front = NvmeFront {
            balance,
            device,
            acceptor,
            intake,
            descriptors,
            connection: None,
            withheld: false,
            had_client: false,
            survival,
            resized,
            watched: Interest::None,
            more: false,
            log: LogLimits::default(),
            accept_log: LogLimit::new(1, ACCEPT_LOG_INTERVAL),
            events: None,
            io: context.io.clone(),
            _entered: entered,
            kept: None,
        };
        match (left, waiting) {
            (Some(left), _) => front.resume(left),
            (None, Some((socket, number))) => front.admit(socket, Some(number)),
            (None, None) => {}
        }
        Ok(front)
    }

    /// Returns the parts that need not be closed on the worker's thread, in the order of their
    /// drop.
    pub fn into_remains(self) -> (Listener, Intake, DoorbellPage) {
        let page = self.device.controller.doorbell_page();
        (self.acceptor.into_listener(), self.intake, page)
    }

    /// Sets the sender of events about this disk. Sending never waits for listeners.
    pub fn tell(&mut self, events: &EventSender, name: String) {
        self.events = Some((events.clone(), name));
    }

    /// Sends an event about this disk to all listeners.
    pub(super) fn happened(&self, kind: EventKind, message: Option<String>) {
        if let Some((events, name)) = &self.events {
            events.send(kind, name, None, message);
        }
    }

    /// Returns the counters of accepted and refused connections to the socket.
    pub fn accepts(&self) -> Arc<AcceptStats> {
        self.acceptor.stats()
    }

    /// Stores registrations that end together with the front-end.
    pub fn keep(&mut self, entry: ListEntry<CountedDisk>, assignment: Assignment) {
        self.kept = Some((entry, assignment));
    }

    /// Returns whether a client is connected.
    pub fn has_client(&mut self) -> bool {
        self.close_if_gone();
        self.connection.is_some()
    }

    /// Returns whether the client is not yet kept, because the keeper is late.
    pub fn is_behind(&self) -> bool {
        self.connection.as_ref().is_some_and(Connection::is_behind)
    }

    /// Returns process and user of the client at the time of its connect.
    pub fn client(&self) -> Option<UCred> {
        self.connection.as_ref()?.peer().ok()
    }

    /// Stops listening, and disconnects the client.
    pub fn dismiss(&mut self) {
        self.listen(false);
        if let Some(mut connection) = self.connection.take() {
            connection.close(&mut self.device);
            self.part_with(connection);
        }
    }

    /// Returns the controller and the worker's io_uring, to attach and detach namespaces.
    pub fn controller_mut(&mut self) -> (&mut Controller, &Rc<Io>) {
        self.device.may_lose_volume();
        (&mut self.device.controller, &self.io)
    }

    #[inline]
    fn controller(&self) -> &Controller {
        &self.device.controller
    }
}

impl Frontend for NvmeFront {
    type Error = Infallible;

    #[inline]
    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool {
        self.device.controller.poll_within(now, budget)
    }

    #[inline]
    fn complete(&mut self, completion: Completion) {
        self.device.controller.complete(completion);
    }

    #[inline]
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        self.device.controller.poll_volumes(out);
    }

    #[inline]
    fn finish_round(&mut self) -> bool {
        self.finish_waiting()
    }

    #[inline]
    fn has_news(&self) -> bool {
        self.controller().has_news()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.controller().in_flight()
    }

    #[inline]
    fn must_poll(&self) -> bool {
        self.controller().needs_polling()
    }

    #[inline]
    fn is_unannounced(&self) -> bool {
        self.controller().is_unannounced()
    }

    #[inline]
    fn keeps_window(&self) -> bool {
        self.controller().shadowed() || self.controller().is_busy()
    }

    #[inline]
    fn has_more(&self) -> bool {
        self.more
    }

    /// Clients that do not use shadow doorbells, or not yet, announce their commands on the socket.
    #[inline]
    fn is_trapped(&self) -> bool {
        self.connection.is_some()
            && !self.controller().shadowed()
            && !self.controller().config().mapped_doorbells
    }

    fn arm(&mut self) -> bool {
        if let Some(connection) = &mut self.connection {
            connection.settle();
        }
        self.device.controller.arm()
    }

    fn needs_recheck(&self) -> bool {
        self.controller().shadowed()
    }

    fn recheck(&mut self) -> bool {
        self.device.controller.recheck()
    }

    fn deadline(&self) -> Option<Instant> {
        let client = self.connection.as_ref().and_then(Connection::deadline);
        let deadlines = [
            self.controller().deadline(),
            client,
            self.intake.deadline(),
            self.acceptor.deadline(),
            self.survival.as_ref().and_then(FrontSurvival::deadline),
        ];
        deadlines.into_iter().flatten().min()
    }

    fn drain_messages(&mut self) -> bool {
        let mut worked = self.device.controller.drain_messages();
        // Idle front-ends are not polled in each round.
        worked |= self.finish_waiting();
        // Namespaces that the guest manages come and go here.
        self.device.controller.tidy(&self.io);
        worked
    }

    fn update_volumes(&mut self) {
        self.device.controller.update_volumes();
    }

    fn housekeeping(&mut self, now: Instant) {
        self.device.controller.tidy(&self.io);
        self.check_intake(now);
        if self
            .survival
            .as_ref()
            .and_then(FrontSurvival::deadline)
            .is_some()
        {
            self.keeper_ready();
        }
        self.resume_accepting(now);
        self.balance.rebalance(&mut self.device.controller, now);
    }

    fn ready(&mut self, token: u32) {
        match token {
            TOKEN_LISTENER => self.accept(),
            TOKEN_INTAKE => self.intake_ready(),
            TOKEN_KEEPER => self.keeper_ready(),
            TOKEN_RESIZED => {
                let _ = rustix::io::read(&self.resized, &mut [0; 8]);
                self.device.controller.check_sizes();
                self.happened(EventKind::Resized, None);
            }
            _ => self.serve(),
        }
    }

    fn read_on(&mut self) {
        self.more = false;
        self.serve();
    }

    fn is_pinning(&self) -> bool {
        self.device.is_pinning()
    }

    fn pin(&mut self, pace: &mut PinPace) {
        self.device.pin_on(pace);
    }

    fn flush(&mut self) {
        if let Some(connection) = &self.connection {
            let pid = connection.peer().ok().map(|p| p.pid.as_raw_nonzero().get());
            tracing::warn!(
                socket = %self.acceptor.listener().path().display(),
                pid,
                "exiting while a client is attached: its guest loses this disk"
            );
        }
        self.device.controller.flush();
    }

    fn is_drained(&self) -> bool {
        self.controller().is_drained()
    }

    fn close(&mut self) -> Result<(), Infallible> {
        // The receiver process has duplicates of both sockets.
        self.dismiss();
        self.release();
        Ok(())
    }
}
