//! The keeper process's store of descriptors.

use crate::packet::Packet;
use crate::text::{self, Request};
use receive::kind;
use rustix::fs::{FileType, fstat};
use rustix::net::sockopt;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

/// Kept descriptor with its name.
#[derive(Clone, Debug)]
pub(crate) struct KeptDescriptor {
    pub name: Rc<str>,
    pub fd: Rc<OwnedFd>,
}

/// Result of a message of the serving process to its keeper.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MessageResult {
    /// The message concerned kept descriptors, and was executed.
    Handled,
    /// The message contains these lines for the service manager.
    Tell(String),
    /// The message requests an upgrade to another program.
    Upgrade,
    /// The message is invalid or exceeds a limit, and nothing was done.
    Refused,
}

/// Descriptors that a keeper holds, each under a unique name.
#[derive(Debug)]
pub(crate) struct Store {
    kept: Vec<KeptDescriptor>,
    most: usize,
    /// Barriers that are not answered: a message before them was refused, and their senders are to
    /// find out that it is not kept.
    held: Vec<OwnedFd>,
    refused: bool,
}

impl Store {
    /// Creates an empty store for at most `most` descriptors.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            kept: Vec::new(),
            most,
            held: Vec::new(),
            refused: false,
        }
    }

    /// Adds a descriptor that another keeper has held.
    pub(crate) fn enter(&mut self, kept: KeptDescriptor) {
        self.kept.push(kept);
    }

    /// Returns all kept descriptors.
    pub(crate) fn all(&self) -> Vec<KeptDescriptor> {
        self.kept.clone()
    }

    /// Returns the maximum number of kept descriptors.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Prepares for the next serving process by closing the unanswered barriers of the last one.
    pub(crate) fn begin(&mut self) {
        self.held.clear();
        self.refused = false;
    }

    /// Executes a message of the serving process.
    pub(crate) fn handle(&mut self, packet: Packet) -> MessageResult {
        let Packet { text, mut fds, cut } = packet;
        let request = if cut { None } else { text::parse(&text) };
        let fd = match fds.len() {
            0 | 1 => fds.pop(),
            // A message has one descriptor at most.
            _ => return self.refuse(),
        };
        match (request, fd) {
            (Some(Request::Store(name)), Some(fd)) if may_be_kept(&fd) => self.store(name, fd),
            (Some(Request::Remove(name)), None) if !is_lasting(name) => {
                self.kept.retain(|kept| &*kept.name != name);
                MessageResult::Handled
            }
            (Some(Request::Barrier), Some(fd)) => {
                // Closing the descriptor answers the barrier.
                if self.refused && self.held.len() < self.most {
                    self.held.push(fd);
                }
                MessageResult::Handled
            }
            (Some(Request::Upgrade), None) => MessageResult::Upgrade,
            (Some(Request::Tell(lines)), None) => MessageResult::Tell(lines.join("\n") + "\n"),
            _ => self.refuse(),
        }
    }

    fn refuse(&mut self) -> MessageResult {
        self.refused = true;
        MessageResult::Refused
    }

    fn store(&mut self, name: &str, fd: OwnedFd) -> MessageResult {
        let fd = Rc::new(fd);
        if let Some(kept) = self.kept.iter_mut().find(|kept| &*kept.name == name) {
            if is_lasting(name) {
                return self.refuse();
            }
            kept.fd = fd;
            return MessageResult::Handled;
        }
        if self.kept.len() >= self.most {
            return self.refuse();
        }
        let name = name.into();
        self.kept.push(KeptDescriptor { name, fd });
        MessageResult::Handled
    }
}

/// Returns whether the descriptor with this name can be neither replaced nor removed.
fn is_lasting(name: &str) -> bool {
    name.starts_with(text::LASTING)
}

/// Returns whether a descriptor is of a kind that is kept: one whose close does not ask a file
/// system, a process or a machine. These are files of memory, eventfds, pipes, Unix sockets, and
/// TCP sockets.
pub fn may_be_kept(fd: &OwnedFd) -> bool {
    if kind::is_memory(fd) || kind::is_eventfd(fd) {
        return true;
    }
    // A socket is no file of another file system: only then `fstat` is harmless.
    if sockopt::socket_type(fd.as_fd()).is_ok() {
        return true;
    }
    rustix::pipe::fcntl_getpipe_size(fd).is_ok()
        && fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::pipe::{PipeFlags, pipe_with};

    fn memory() -> OwnedFd {
        memfd_create("kept", MemfdFlags::CLOEXEC).unwrap()
    }

    fn packet(text: &str, fds: Vec<OwnedFd>) -> Packet {
        let (text, cut) = (text.as_bytes().to_vec(), false);
        Packet { text, fds, cut }
    }

    fn names(store: &Store) -> Vec<String> {
        store
            .all()
            .iter()
            .map(|kept| kept.name.to_string())
            .collect()
    }

    #[test]
    fn descriptors_stay_until_removed() {
        let mut store = Store::new(4);
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        for (name, fd) in [
            ("r", read),
            ("w", write),
            ("e", event),
            ("s", socket.into()),
        ] {
            assert_eq!(
                store.handle(packet(&text::store(name), vec![fd])),
                MessageResult::Handled
            );
        }
        assert_eq!(names(&store), ["r", "w", "e", "s"]);
        assert_eq!(
            store.handle(packet(&text::remove("w"), vec![])),
            MessageResult::Handled
        );
        assert_eq!(
            store.handle(packet(&text::remove("none"), vec![])),
            MessageResult::Handled
        );
        assert_eq!(names(&store), ["r", "e", "s"]);
        // A second descriptor of the same name replaces the first.
        let before = store.all().len();
        assert_eq!(
            store.handle(packet(&text::store("e"), vec![memory()])),
            MessageResult::Handled
        );
        assert_eq!(store.all().len(), before);
    }

    #[test]
    fn lasting_descriptor_is_neither_replaced_nor_removed() {
        let mut store = Store::new(4);
        let name = format!("{}a", text::LASTING);
        let first = memory();
        let inode = |fd: &OwnedFd| fstat(fd).unwrap().st_ino;
        let wanted = inode(&first);
        let stored = store.handle(packet(&text::store(&name), vec![first]));
        assert_eq!(stored, MessageResult::Handled);
        let again = store.handle(packet(&text::store(&name), vec![memory()]));
        assert_eq!(again, MessageResult::Refused);
        let removed = store.handle(packet(&text::remove(&name), vec![]));
        assert_eq!(removed, MessageResult::Refused);
        assert_eq!(inode(&store.all()[0].fd), wanted);
    }

    #[test]
    fn store_beyond_limit_is_refused_without_barrier_reply() {
        let mut store = Store::new(1);
        let answered = |store: &mut Store| {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
            store.handle(packet(text::BARRIER, vec![write]));
            rustix::io::read(&read, &mut [0; 1]) == Ok(0)
        };
        store.handle(packet(&text::store("a"), vec![memory()]));
        assert!(answered(&mut store));
        let more = store.handle(packet(&text::store("b"), vec![memory()]));
        assert_eq!(more, MessageResult::Refused);
        assert!(!answered(&mut store), "who waits believes that it is kept");
        store.begin();
        assert!(answered(&mut store));
        assert_eq!(names(&store), ["a"]);
    }

    #[test]
    fn malformed_message_stores_nothing() {
        let mut store = Store::new(100);
        let file = tempfile::tempfile().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let store_a = text::store("a");
        let nonsense = [
            packet("", vec![]),
            packet("FDSTORE=1\nFDNAME=a\n", vec![]),
            packet(&store_a, vec![memory(), memory()]),
            packet(&text::remove("a"), vec![memory()]),
            packet("READY=1\n", vec![memory()]),
            packet(text::BARRIER, vec![]),
            packet(text::UPGRADE, vec![memory()]),
            packet("\u{1}", vec![memory()]),
            packet(&store_a, vec![null.into()]),
            Packet {
                cut: true,
                ..packet(&store_a, vec![memory()])
            },
        ];
        for packet in nonsense {
            let said = format!("{packet:?}");
            assert_eq!(store.handle(packet), MessageResult::Refused, "{said}");
        }
        // A file of a disk, unless the test's own is on tmpfs.
        if !kind::is_memory(&file) {
            let refused = store.handle(packet(&store_a, vec![file.into()]));
            assert_eq!(refused, MessageResult::Refused);
        }
        assert!(store.all().is_empty());
    }

    #[test]
    fn held_barriers_are_bounded() {
        let mut store = Store::new(3);
        store.handle(packet("nonsense", vec![]));
        for _ in 0..50 {
            let (_read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            store.handle(packet(text::BARRIER, vec![write]));
        }
        assert_eq!(store.held.len(), 3);
    }
}
