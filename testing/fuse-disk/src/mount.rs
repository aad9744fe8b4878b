//! A file system that is mounted, and the way of its messages.

use crate::message::{Answer, Dispatch, Form, Request, answer, opcode, parse};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Maximum length in bytes of a message of the kernel, and size of the receive buffer.
const MESSAGE: usize = (1 << 20) + 0x1000;

/// A server of a mounted file system, which answers the kernel's requests. One thread calls it.
pub trait RequestHandler {
    /// Answers one.
    fn serve(&mut self, request: &Request<'_>) -> Answer;

    /// Returns whether a message with this opcode is processed now. Any other message is never
    /// answered, unless it is kept and passed to [`Mount::process`] later.
    fn accepts(&mut self, _opcode: u32, _message: &[u8]) -> bool {
        true
    }
}

/// Sends the answers that a [`RequestHandler`] has deferred, from any thread.
#[derive(Debug, Clone)]
pub struct Sender {
    device: Arc<File>,
    /// Requests without an answer so far: the form that the answer must have, by request
    /// identifier.
    pending: Arc<Mutex<HashMap<u64, Form>>>,
}

impl Sender {
    /// Answers a request that was answered by [`Answer::Later`]. Does nothing if it is not there.
    pub fn answer(&self, id: u64, with: Answer) {
        let form = self.pending.lock().unpoisoned().remove(&id);
        if let Some(form) = form {
            self.send(id, form, with);
        }
    }

    fn send(&self, id: u64, form: Form, with: Answer) {
        match answer(id, form, with) {
            // The requesting process may have ended.
            Some(message) => drop((&*self.device).write(&message)),
            None => drop(self.pending.lock().unpoisoned().insert(id, form)),
        }
    }
}

/// A mounted file system. It is unmounted when this is dropped; open files of it stay open, and get
/// errors ([`Mount::abort`]).
#[derive(Debug)]
pub struct Mount {
    sender: Sender,
    point: PathBuf,
    /// The kernel's number of the FUSE connection, a directory in `/sys/fs/fuse/connections`.
    number: u32,
}

impl Mount {
    /// Mounts the file system at the directory `point`, which is created; only root may mount.
    pub fn new(point: &Path) -> io::Result<Self> {
        fs::create_dir_all(point)?;
        let point = &fs::canonicalize(point)?;
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let data = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
            device.as_raw_fd()
        );
        let data = CString::new(data)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("vnvme-test", point, "fuse", flags, data.as_c_str())?;
        let mut mounted = Self {
            sender: Sender {
                device: Arc::new(device),
                pending: Arc::default(),
            },
            point: point.into(),
            number: 0,
        };
        // The kernel's first message: nobody can ask for anything before it is answered.
        mounted.serve_message(&mut Nothing, &mut vec![0; MESSAGE])?;
        mounted.number = connection(point).unwrap_or(0);
        Ok(mounted)
    }

    /// Returns the path of the file with this number in the mounted directory.
    pub fn file(&self, number: u64) -> PathBuf {
        self.point.join(number.to_string())
    }

    /// Returns the sender for deferred answers.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }

    /// Answers the kernel's requests through `server` until the connection ends.
    pub fn serve(&self, server: &mut impl RequestHandler) {
        let mut message = vec![0; MESSAGE];
        while self.serve_message(server, &mut message).is_ok() {}
    }

    fn serve_message(
        &self,
        server: &mut impl RequestHandler,
        message: &mut [u8],
    ) -> io::Result<()> {
        let len = match (&*self.sender.device).read(message) {
            Ok(len) => len,
            // A request that was interrupted before it was read (ENOENT).
            Err(error) if error.raw_os_error() == Some(crate::message::ENOENT) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        };
        let message = message.get(..len).unwrap_or_default();
        if server.accepts(opcode(message), message) {
            self.process(server, message);
        }
        Ok(())
    }

    /// Processes a message of the kernel, and answers it unless `server` defers that.
    pub fn process(&self, server: &mut impl RequestHandler, message: &[u8]) {
        match parse(message) {
            Dispatch::Nothing => {}
            Dispatch::Here(reply) => drop((&*self.sender.device).write(&reply)),
            Dispatch::Server(request, form) => {
                // Before it is asked: another thread may answer before this one returns.
                let pending = &self.sender.pending;
                pending.lock().unpoisoned().insert(request.id, form);
                let answer = server.serve(&request);
                if answer != Answer::Later {
                    self.sender.answer(request.id, answer);
                }
            }
        }
    }

    /// Aborts the connection: all pending and later requests fail.
    pub fn abort(&self) {
        let path = format!("/sys/fs/fuse/connections/{}/abort", self.number);
        if fs::write(&path, "1").is_ok() {
            return;
        }
        // Only there where it is mounted.
        let control = Path::new("/sys/fs/fuse/connections");
        let kind = "fusectl";
        if mount(
            "fusectl",
            control,
            kind,
            MountFlags::empty(),
            None::<&std::ffi::CStr>,
        )
        .is_ok()
        {
            let _ = fs::write(&path, "1");
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.abort();
        let _ = unmount(&self.point, UnmountFlags::DETACH);
    }
}

/// Returns the number of the connection: the minor number of the file system's device
/// (proc_pid_mountinfo(5)). Asking the file system itself would need its server.
fn connection(point: &Path) -> Option<u32> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let here = |line: &&str| line.split(' ').nth(4) == point.to_str();
    let device = mounts.lines().rev().find(here)?.split(' ').nth(2)?;
    device.split_once(':')?.1.parse().ok()
}

/// Answers nothing but the kernel's first message, which nobody is asked for.
struct Nothing;

impl RequestHandler for Nothing {
    fn serve(&mut self, _: &Request<'_>) -> Answer {
        Answer::Error(crate::message::EIO)
    }
}
