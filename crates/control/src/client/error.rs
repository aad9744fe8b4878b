//! Why there is no good answer.

use std::fmt::{self, Display};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Why there is no good answer.
#[derive(Debug)]
pub enum ClientError {
    /// No socket could be connected to: those that were tried.
    NotThere(Vec<(PathBuf, io::Error)>),
    /// The process behind the socket serves no control API.
    NotControl(PathBuf),
    /// The process has refused the request.
    Refused {
        /// The control socket.
        path: PathBuf,
        /// HTTP's status.
        status: u16,
        /// Why, in words.
        message: String,
    },
    /// There was no answer in time.
    TimedOut(PathBuf),
    /// The answer cannot be understood, or it ended before its end.
    Broken(PathBuf, String),
    /// A system call failed.
    System(io::Error),
}

impl ClientError {
    pub(super) fn broken(path: &Path, error: &dyn Display) -> Self {
        Self::Broken(path.to_owned(), error.to_string())
    }

    /// Makes the error of a request without an answer.
    pub(super) fn of_exchange(path: &Path, error: &hyper::Error) -> Self {
        // A disk's socket closes the connection as soon as it has read HTTP.
        let source = std::error::Error::source(error);
        let is_reset = source
            .and_then(|source| source.downcast_ref::<io::Error>())
            .is_some_and(|error| {
                let reset = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
                reset.contains(&error.kind())
            });
        let closed = error.is_incomplete_message() || error.is_canceled() || error.is_closed();
        match closed || is_reset || error.is_parse() {
            true => Self::NotControl(path.to_owned()),
            false => Self::broken(path, error),
        }
    }
}

impl Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotThere(tried) => {
                let mut separator = "";
                for (path, error) in tried {
                    write!(f, "{separator}{}: ", path.display())?;
                    match error.kind() {
                        io::ErrorKind::NotFound => f.write_str("there is no control socket")?,
                        io::ErrorKind::ConnectionRefused if !is_socket(path) => {
                            f.write_str("this is no socket")?;
                        }
                        io::ErrorKind::ConnectionRefused => {
                            f.write_str("the process that made this socket has ended")?;
                        }
                        // Error of the standard library for a path that is too long.
                        io::ErrorKind::InvalidInput => {
                            f.write_str("the path of a socket has at most 107 bytes")?;
                        }
                        io::ErrorKind::PermissionDenied => {
                            f.write_str("this user may not connect to it")?;
                        }
                        _ => write!(f, "{error}")?,
                    }
                    separator = "; ";
                }
                f.write_str(" (is vnvme running? --control PATH names its control socket)")
            }
            Self::NotControl(path) => write!(
                f,
                "{}: what listens there does not answer as a control socket does; is it the \
                 socket of a disk?",
                path.display()
            ),
            Self::Refused { message, .. } => f.write_str(message),
            Self::TimedOut(path) => write!(
                f,
                "{}: no answer in time (a process that starts answers when all that it serves is \
                 open; its log says how far it is)",
                path.display()
            ),
            Self::Broken(path, why) => write!(f, "{}: {why}", path.display()),
            Self::System(error) => error.fmt(f),
        }
    }
}

/// Returns whether a path is a socket. A path that cannot be examined may be one.
fn is_socket(path: &Path) -> bool {
    path.metadata()
        .map_or(true, |file| file.file_type().is_socket())
}

impl std::error::Error for ClientError {}
