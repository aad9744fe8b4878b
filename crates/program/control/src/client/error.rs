//! Errors of the client.

use std::fmt::{self, Display};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// HTTP status with which the socket of a disk answers (RFC 9110, section 15.5.20).
const MISDIRECTED: u16 = 421;

/// Reason why a request to the management API has failed.
#[derive(Debug)]
pub enum ClientError {
    /// No control socket accepts connections. The value lists those that were tried.
    NotThere(Vec<(PathBuf, io::Error)>),
    /// The process behind the socket does not serve the management API.
    NotControl(PathBuf),
    /// The process refused the request.
    Refused {
        /// Path of the control socket that has refused the request.
        path: PathBuf,
        /// HTTP status of the answer.
        status: u16,
        /// Reason in the answer, as text.
        message: String,
    },
    /// The process did not answer within the time limit.
    TimedOut(PathBuf),
    /// The answer is malformed or incomplete, for this reason.
    Broken(PathBuf, String),
    /// A system call failed.
    System(io::Error),
}

impl ClientError {
    pub(super) fn broken(path: &Path, error: &dyn Display) -> Self {
        Self::Broken(path.to_owned(), error.to_string())
    }

    /// Returns the cause as text, without the advice for a user who may have named the wrong
    /// socket.
    pub fn cause(&self) -> String {
        match self {
            Self::NotThere(tried) => {
                let causes = tried.iter().map(|(path, error)| not_there(path, error));
                causes.collect::<Vec<_>>().join("; ")
            }
            other => other.to_string(),
        }
    }

    /// Returns the error of a request that got no answer.
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
        if closed || is_reset || error.is_parse() {
            Self::NotControl(path.to_owned())
        } else {
            Self::broken(path, error)
        }
    }
}

impl Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotThere(_) => write!(
                f,
                "{} (is vnvme running? Name its control socket with --control PATH)",
                self.cause()
            ),
            Self::NotControl(path) => write!(
                f,
                "{}: this socket does not answer like a control socket; it may be the socket of a \
                 disk",
                path.display()
            ),
            Self::Refused {
                path,
                status: MISDIRECTED,
                message,
            } => write!(
                f,
                "{}: {message}; name the control socket with --control PATH",
                path.display()
            ),
            Self::Refused { message, .. } => f.write_str(message),
            Self::TimedOut(path) => write!(
                f,
                "{}: no answer within the time limit. A starting process answers when all its \
                 disks are open; see its log",
                path.display()
            ),
            Self::Broken(path, why) => write!(f, "{}: {why}", path.display()),
            Self::System(error) => error.fmt(f),
        }
    }
}

/// Returns the reason why no control socket at a path accepts connections.
fn not_there(path: &Path, error: &io::Error) -> String {
    let reason = match error.kind() {
        io::ErrorKind::NotFound => "no control socket exists here",
        io::ErrorKind::ConnectionRefused if !is_socket(path) => "this is not a socket",
        io::ErrorKind::ConnectionRefused => "the process that created this socket has ended",
        // Error of the standard library for a path that is too long.
        io::ErrorKind::InvalidInput => {
            "the path is too long: the path of a socket has at most 107 bytes"
        }
        io::ErrorKind::PermissionDenied => {
            "permission denied; run as a user of its group, or as root"
        }
        _ => return format!("{}: {error}", path.display()),
    };
    format!("{}: {reason}", path.display())
}

/// Returns whether a path is a socket. A path that cannot be examined may be one.
fn is_socket(path: &Path) -> bool {
    path.metadata()
        .map_or(true, |file| file.file_type().is_socket())
}

impl std::error::Error for ClientError {}
