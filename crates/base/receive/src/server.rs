//! The receiver process: one thread that reads messages and never closes clients' descriptors, and
//! a pool of threads that do.

use crate::kind::AcceptedDescriptors;
use crate::message::{self, Incoming, MAX_FDS, MESSAGE_LEN, Message};
use crate::pool::ThreadPool;
use crate::session::{Common, Session};
use rustix::event::{EventfdFlags, PollFlags, Timespec, epoll, eventfd};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, shutdown};
use std::collections::HashMap;
use std::error::Error;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use sync::readiness;

/// Time until the creation of a thread is retried, in nanoseconds.
const THREAD_RETRY_DELAY: i64 = 100_000_000;
/// Number of the control socket in the epoll set. Listeners count from 1.
const CONTROL: u64 = 0;
/// Number of the eventfd that reports too many descriptors in flight.
const CROWDED: u64 = u64::MAX;

/// Maximum number of descriptors that may wait in a client's socket while the kernel takes no more
/// of this user's: as many as one message can have.
const MAX_WAITING: usize = MAX_FDS;

/// Reason why the receiver process cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A system call failed.
    #[error("{call}")]
    System {
        /// Name of the system call that failed.
        call: &'static str,
        /// Error number of the system call.
        #[source]
        errno: Errno,
    },
    /// The receiver process could not enter its sandbox.
    #[error("the process cannot be confined")]
    Confine(#[source] Box<dyn Error + Send + Sync>),
}

fn system(call: &'static str) -> impl Fn(Errno) -> ServeError {
    move |errno| ServeError::System { call, errno }
}

/// Listening socket of the server, with its clients, as the receiver process knows it.
struct ServedListener {
    channel: Arc<OwnedFd>,
    listener: OwnedFd,
    wanted: AcceptedDescriptors,
    clients: HashMap<u64, Arc<Session>>,
    /// Whether the clients' sockets are lost with the server, because no other process keeps them.
    ends: bool,
    /// Whether the link is closed because the server no longer listens there.
    shut: bool,
}

struct Server {
    epoll: OwnedFd,
    listeners: HashMap<u64, ServedListener>,
    last_listener: u64,
    pool: ThreadPool,
    common: Arc<Common>,
    /// Socket that is hung up when no other process keeps the clients' sockets.
    kept: Option<OwnedFd>,
    /// Another receiver process has taken this one's place.
    retired: bool,
}

/// Receives for the server at the other end of `control` until that closes its end. It must be
/// called by a process of its own, which ends right after. Its sockets are shut down then, unless
/// another process keeps them ([`Receiver::keep`](crate::Receiver::keep)), and its threads may
/// hang. `confine` is called when no further file is opened, before any data of a client is read:
/// it may revoke the process's right to open files.
///
/// # Errors
/// [`ServeError::System`] when a system call fails; [`ServeError::Confine`] when `confine` does.
pub fn serve(
    control: BorrowedFd<'_>,
    confine: impl FnOnce() -> Result<(), Box<dyn Error + Send + Sync>>,
) -> Result<(), ServeError> {
    let stand_in = open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let crowded = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let mut server = Server {
        epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create1"))?,
        listeners: HashMap::new(),
        last_listener: CONTROL,
        pool: ThreadPool::default(),
        common: Arc::new(Common {
            stand_in: stand_in.map_err(system("open"))?,
            crowded: crowded.map_err(system("eventfd"))?,
            info: open("/proc/self/fdinfo", folder, Mode::empty()).ok(),
        }),
        kept: None,
        retired: false,
    };
    confine().map_err(ServeError::Confine)?;
    server
        .watch(control, CONTROL)
        .map_err(system("epoll_ctl"))?;
    server
        .watch(server.common.crowded.as_fd(), CROWDED)
        .map_err(system("epoll_ctl"))?;
    let ended = server.run(control);
    if !server.retired {
        server.shut_down(server.is_kept());
    }
    // Dropping the server could hang in a client's socket.
    std::mem::forget(server);
    ended
}

impl Server {
    fn watch(&self, fd: BorrowedFd<'_>, number: u64) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(number);
        epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
    }

    fn run(&mut self, control: BorrowedFd<'_>) -> Result<(), ServeError> {
        loop {
            let retry = self.pool.is_behind().then_some(Timespec {
                tv_sec: 0,
                tv_nsec: THREAD_RETRY_DELAY as _,
            });
            let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 64];
            let ready: Vec<u64> = match epoll::wait(&self.epoll, &mut events[..], retry.as_ref()) {
                Ok((ready, _)) => ready.iter().map(|event| event.data.u64()).collect(),
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(system("epoll_wait")(errno)),
            };
            if ready.is_empty() {
                self.pool.grow();
            }
            for number in ready {
                let goes_on = match number {
                    CONTROL => self.accept_listeners(control),
                    CROWDED => self.relieve(),
                    _ => self.door_ready(number, control),
                };
                if !goes_on {
                    return Ok(());
                }
            }
        }
    }

    /// Accepts new links of listeners from the server. Returns `false` when the server has ended.
    fn accept_listeners(&mut self, control: BorrowedFd<'_>) -> bool {
        loop {
            match message::receive::<MESSAGE_LEN>(control) {
                Ok(Some(incoming)) => match incoming.message.kind {
                    message::kind::KEPT => self.kept = incoming.fds.into_iter().next(),
                    message::kind::SHUT => self.kept = None,
                    message::kind::RETIRE => {
                        self.retired = true;
                        return false;
                    }
                    _ => self.open_listener(incoming),
                },
                Ok(None) => return false,
                Err(Errno::AGAIN) => return true,
                // A dropped message is a listener link; its other end sees the hang-up.
                Err(_) => {}
            }
        }
    }

    fn open_listener(&mut self, incoming: Incoming) {
        let mut fds = incoming.fds.into_iter();
        let (Some(channel), Some(listener)) = (fds.next(), fds.next()) else {
            return;
        };
        let number = self.last_listener + 1;
        self.last_listener = number;
        let served = ServedListener {
            channel: Arc::new(channel),
            listener,
            wanted: AcceptedDescriptors::of_value(incoming.message.value),
            clients: HashMap::new(),
            ends: incoming.message.value & message::ENDS != 0,
            shut: false,
        };
        match self.watch(served.channel.as_fd(), number) {
            Ok(()) => {
                self.listeners.insert(number, served);
            }
            // The listening socket may have clients by now.
            Err(_) => self.pool.run(move || drop(served)),
        }
    }

    /// Handles the messages of a listener link. Returns `false` when the server has ended.
    fn door_ready(&mut self, number: u64, control: BorrowedFd<'_>) -> bool {
        while let Some(served) = self.listeners.get_mut(&number) {
            match message::receive::<MESSAGE_LEN>(served.channel.as_fd()) {
                Ok(Some(incoming)) => {
                    let crowded = incoming.message.kind == message::kind::CROWDED;
                    served.handle(incoming, &self.pool, &self.common);
                    if crowded {
                        self.relieve();
                    }
                }
                Err(Errno::AGAIN) => return true,
                Ok(None) | Err(_) => {
                    // A server with another receiver process has said so before.
                    if !self.accept_listeners(control) {
                        return false;
                    }
                    // The server's front-end has ended.
                    let kept = self.is_kept();
                    if let Some(served) = self.listeners.remove(&number) {
                        let _ = epoll::delete(&self.epoll, &served.channel);
                        served.shut_down(kept && !served.shut);
                        let ServedListener {
                            clients, listener, ..
                        } = served;
                        for session in clients.into_values() {
                            self.pool.run(move || drop(session));
                        }
                        self.pool.run(move || drop(listener));
                    }
                    return true;
                }
            }
        }
        true
    }

    /// Shuts the sockets of clients down in which more descriptors wait than a client needs. The
    /// kernel counts waiting descriptors of all processes of a user, and takes no more of them now.
    fn relieve(&mut self) -> bool {
        let _ = rustix::io::read(&self.common.crowded, &mut [0; 8]);
        for served in self.listeners.values_mut() {
            let floods = |session: &Arc<Session>| session.waiting() > MAX_WAITING;
            for (_, session) in served.clients.extract_if(|_, session| floods(session)) {
                if let Some(socket) = session.socket() {
                    let _ = shutdown(socket, Shutdown::Both);
                }
                self.pool.run(move || session.empty());
            }
        }
        true
    }

    /// Returns whether another process keeps the clients' sockets for the next server.
    fn is_kept(&self) -> bool {
        let kept = self.kept.as_ref();
        kept.is_some_and(|kept| !readiness(kept, PollFlags::empty()).contains(PollFlags::HUP))
    }

    /// Ends listening, and shuts all clients' sockets down. If sockets are `kept`, only the clients
    /// of other listeners are shut down.
    fn shut_down(&self, kept: bool) {
        self.listeners
            .values()
            .for_each(|served| served.shut_down(kept));
    }
}

impl ServedListener {
    fn handle(&mut self, incoming: Incoming, pool: &ThreadPool, common: &Arc<Common>) {
        let Incoming { message, fds, .. } = incoming;
        let client = message.client;
        match message.kind {
            message::kind::OPEN => match fds.into_iter().next() {
                Some(socket) => {
                    let served = self.channel.clone();
                    let session = Session::new(client, socket, served, self.wanted, common.clone());
                    // Client numbers are unique.
                    if let Some(former) = self.clients.insert(client, Arc::new(session)) {
                        pool.run(move || drop(former));
                    }
                }
                // No descriptor is left: the server must know that its own is the last.
                None => self.say(message::kind::CLOSED, client),
            },
            // Tasks that wait for a thread would be taken for tasks that hang.
            message::kind::PING if !pool.is_behind() => {
                let session = self.clients.get(&client);
                let is_crowded = session.is_some_and(|session| session.is_crowded());
                self.send(message::kind::PONG, u32::from(is_crowded), client);
            }
            message::kind::PEEK => match self.clients.get(&client) {
                Some(session) => {
                    let session = session.clone();
                    pool.run(move || session.look(message.value));
                }
                None => self.say(message::kind::CLOSED, client),
            },
            message::kind::PEEKED => {
                if let Some(session) = self.clients.get(&client) {
                    let looked = session.take_looked();
                    let session = session.clone();
                    pool.run(move || session.close(looked));
                }
            }
            message::kind::END => {
                if let Some(session) = self.clients.remove(&client) {
                    pool.run(move || drop(session));
                }
            }
            message::kind::SHUT => self.shut = true,
            _ => {}
        }
    }

    fn say(&self, kind: u32, client: u64) {
        self.send(kind, 0, client);
    }

    /// Sends a message from this thread, which never waits.
    fn send(&self, kind: u32, value: u32, client: u64) {
        let message = Message {
            kind,
            value,
            client,
        };
        let _ = message::send(self.channel.as_fd(), message, &[], &[], SendFlags::DONTWAIT);
    }

    fn shut_down(&self, kept: bool) {
        if !kept {
            let _ = shutdown(&self.listener, Shutdown::Both);
        } else if !self.ends {
            return;
        }
        let sockets = self.clients.values().filter_map(|session| session.socket());
        for socket in sockets {
            let _ = shutdown(socket, Shutdown::Both);
        }
    }
}
