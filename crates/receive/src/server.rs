//! The receiver process: one thread that reads messages and never closes what clients have sent,
//! and a pool of threads that do.

use crate::kind::Wanted;
use crate::message::{self, Incoming, Message, SHORT};
use crate::pool::Pool;
use crate::session::Session;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, shutdown};
use std::collections::HashMap;
use std::error::Error;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Until a thread that could not be made is tried again, in nanoseconds.
const RETRY: i64 = 100_000_000;
/// The control socket's number in the epoll set. Doors count from 1.
const CONTROL: u64 = 0;

/// Why the receiver process cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A system call failed.
    #[error("{call}")]
    System {
        /// The system call.
        call: &'static str,
        /// Its error.
        #[source]
        errno: Errno,
    },
    /// It could not be confined, as its caller wants it.
    #[error("the process cannot be confined")]
    Confine(#[source] Box<dyn Error + Send + Sync>),
}

fn system(call: &'static str) -> impl Fn(Errno) -> ServeError {
    move |errno| ServeError::System { call, errno }
}

/// A listening socket and its clients.
struct Door {
    channel: Arc<OwnedFd>,
    listener: OwnedFd,
    wanted: Wanted,
    clients: HashMap<u64, Arc<Session>>,
    /// Nobody keeps its clients' sockets for the server that comes next.
    ends: bool,
    /// It is closed because the server does not listen there any more.
    shut: bool,
}

struct Server {
    epoll: OwnedFd,
    doors: HashMap<u64, Door>,
    last_door: u64,
    pool: Pool,
    stand_in: Arc<OwnedFd>,
    /// Hung up when nobody else keeps the clients' sockets.
    kept: Option<OwnedFd>,
}

/// Receives for the server at the other end of `control` until that closes its end. To be called
/// by a process of its own, which is to end right after: everything that it holds is shut down
/// then, unless another process keeps it ([`Receiver::keep`](crate::Receiver::keep)), and threads
/// of it may hang. `confine` is called when nothing more is opened, before
/// anything comes from a client: it may take the right to do so from the process.
///
/// # Errors
/// [`ServeError`].
pub fn serve(
    control: BorrowedFd<'_>,
    confine: impl FnOnce() -> Result<(), Box<dyn Error + Send + Sync>>,
) -> Result<(), ServeError> {
    let stand_in = open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let mut server = Server {
        epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create1"))?,
        doors: HashMap::new(),
        last_door: CONTROL,
        pool: Pool::default(),
        stand_in: Arc::new(stand_in.map_err(system("open"))?),
        kept: None,
    };
    confine().map_err(ServeError::Confine)?;
    server
        .watch(control, CONTROL)
        .map_err(system("epoll_ctl"))?;
    let ended = server.run(control);
    server.shut_down(server.is_kept());
    // Dropping it could hang in a client's socket.
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
                tv_nsec: RETRY as _,
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
                if number != CONTROL {
                    self.door_ready(number);
                } else if !self.open_doors(control) {
                    return Ok(());
                }
            }
        }
    }

    /// `false` when the server has gone.
    fn open_doors(&mut self, control: BorrowedFd<'_>) -> bool {
        loop {
            match message::receive::<SHORT>(control) {
                Ok(Some(incoming)) => match incoming.message.kind {
                    message::kind::KEPT => self.kept = incoming.fds.into_iter().next(),
                    message::kind::SHUT => self.kept = None,
                    _ => self.open_door(incoming),
                },
                Ok(None) => return false,
                Err(Errno::AGAIN) => return true,
                // What was dropped is a door, whose other end sees that.
                Err(_) => {}
            }
        }
    }

    fn open_door(&mut self, incoming: Incoming) {
        let mut fds = incoming.fds.into_iter();
        let (Some(channel), Some(listener)) = (fds.next(), fds.next()) else {
            return;
        };
        let number = self.last_door + 1;
        self.last_door = number;
        let door = Door {
            channel: Arc::new(channel),
            listener,
            wanted: Wanted::of_value(incoming.message.value),
            clients: HashMap::new(),
            ends: incoming.message.value & message::ENDS != 0,
            shut: false,
        };
        match self.watch(door.channel.as_fd(), number) {
            Ok(()) => {
                self.doors.insert(number, door);
            }
            // Its listening socket may have clients by now.
            Err(_) => self.pool.run(move || drop(door)),
        }
    }

    fn door_ready(&mut self, number: u64) {
        while let Some(door) = self.doors.get_mut(&number) {
            match message::receive::<SHORT>(door.channel.as_fd()) {
                Ok(Some(incoming)) => door.handle(incoming, &self.pool, &self.stand_in),
                Err(Errno::AGAIN) => return,
                Ok(None) | Err(_) => {
                    // That front-end of the server has gone.
                    let _ = epoll::delete(&self.epoll, &door.channel);
                    let kept = self.is_kept();
                    if let Some(door) = self.doors.remove(&number) {
                        door.shut_down(kept && !door.shut);
                        let Door {
                            clients, listener, ..
                        } = door;
                        for session in clients.into_values() {
                            self.pool.run(move || drop(session));
                        }
                        self.pool.run(move || drop(listener));
                    }
                    return;
                }
            }
        }
    }

    /// Another process keeps the clients' sockets, for the server that comes next.
    fn is_kept(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| {
            let mut fds = [PollFd::new(kept, PollFlags::empty())];
            poll(&mut fds, Some(&Timespec::default())).is_ok()
                && !fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
        })
    }

    /// Nobody can connect any more, and every client sees the end of its connection. Where sockets
    /// are `kept`, only those clients do whose sockets are not.
    fn shut_down(&self, kept: bool) {
        self.doors.values().for_each(|door| door.shut_down(kept));
    }
}

impl Door {
    fn handle(&mut self, incoming: Incoming, pool: &Pool, stand_in: &Arc<OwnedFd>) {
        let Incoming { message, fds, .. } = incoming;
        let client = message.client;
        match message.kind {
            message::kind::OPEN => match fds.into_iter().next() {
                Some(socket) => {
                    let door = self.channel.clone();
                    let session = Session::new(client, socket, door, self.wanted, stand_in.clone());
                    // Numbers do not come twice.
                    if let Some(former) = self.clients.insert(client, Arc::new(session)) {
                        pool.run(move || drop(former));
                    }
                }
                // No descriptor is left: the server is to know that its own is the last.
                None => self.say(message::kind::CLOSED, client),
            },
            message::kind::RECEIVE => match self.clients.get(&client) {
                Some(session) => {
                    let session = session.clone();
                    pool.run(move || session.receive(message.value));
                }
                None => self.say(message::kind::CLOSED, client),
            },
            message::kind::LOOK => match self.clients.get(&client) {
                Some(session) => {
                    let session = session.clone();
                    pool.run(move || session.look(message.value));
                }
                None => self.say(message::kind::CLOSED, client),
            },
            message::kind::LOOKED => {
                if let Some(session) = self.clients.get(&client) {
                    let looked = session.take_looked();
                    pool.run(move || drop(looked));
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

    /// From this thread, which never waits.
    fn say(&self, kind: u32, client: u64) {
        let message = Message {
            kind,
            value: 0,
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
