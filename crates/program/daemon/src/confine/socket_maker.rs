//! Sockets for other users and groups, made while the process runs. The sandbox lets no file change
//! its owner, group or mode, so the process that starts receivers makes these sockets outside.
//!
//! That process makes new sockets only, below the folders of `allow`, with the access control of a
//! disk or of `[process]` in the configuration at the start ([`Grants`]). A request has a path and
//! the number of an access control, so a compromised serving process can neither name a user or
//! group, nor change an existing file.

use crate::manage::places;
use crate::serve::options::ServeOptions;
use config::access::SocketAccess;
use config::choices::SandboxMode;
use config::disk::DiskSpec;
use receive::Spawner;
use rustix::fs::{Gid, Mode, Uid};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vfio_user::{Access, ListenError, Listener, bind_socket};

/// Arguments of the process: a folder, and an access control (`OWNER:GROUP:MODE`, in numbers).
const BELOW: &[u8] = b"--sockets-below=";
const ACCESS: &str = "--socket-access=";

/// Folders and access controls of sockets that can be made in the sandbox.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    rights: SocketRights,
    /// Access controls as the configuration has them, in the order of `rights`.
    accesses: Vec<SocketAccess>,
}

impl Grants {
    /// Returns the grants of a process that starts with these disks. `usual` is the default access
    /// control.
    pub fn new(options: &ServeOptions, usual: &SocketAccess, disks: &[DiskSpec]) -> Self {
        let mut grants = Self::default();
        let places = places(options).into_iter();
        let places = places.filter_map(|place| options.answers.canonicalize(&place).ok());
        let below: Vec<PathBuf> = places.filter(|place| place.is_dir()).collect();
        if options.sandbox == SandboxMode::Off || below.is_empty() {
            return grants;
        }
        let own = disks.iter().filter_map(|disk| disk.access());
        for access in own.map(|own| own.or(usual)).chain([usual.clone()]) {
            // Users and groups are looked up before the sandbox is entered. An unknown one is an
            // error of its disk.
            if !access.is_usual()
                && !grants.has(&access)
                && let Ok(resolved) = access.resolve()
            {
                grants.rights.accesses.push(resolved);
                grants.accesses.push(access);
            }
        }
        if !grants.accesses.is_empty() {
            grants.rights.below = below;
        }
        grants
    }

    /// Returns whether a socket can have this access control.
    pub fn has(&self, access: &SocketAccess) -> bool {
        self.number(access).is_some()
    }

    fn number(&self, access: &SocketAccess) -> Option<u32> {
        let is_it = |granted: &SocketAccess| granted.is_same(access);
        let number = self.accesses.iter().position(is_it)?;
        u32::try_from(number).ok()
    }

    /// Returns the rights of the process that makes the sockets.
    pub fn rights(&self) -> &SocketRights {
        &self.rights
    }
}

/// Maker of sockets for a process in its sandbox.
#[derive(Debug)]
pub struct SocketMaker {
    grants: Grants,
    spawner: Arc<Spawner>,
    /// Base of relative paths. The other process has another current directory.
    here: PathBuf,
}

impl SocketMaker {
    /// Makes the maker, before the sandbox is entered.
    pub fn new(grants: Grants, spawner: Arc<Spawner>) -> Self {
        Self {
            grants,
            spawner,
            here: std::env::current_dir().unwrap_or_default(),
        }
    }

    /// Returns the folders and access controls of its sockets.
    pub fn grants(&self) -> &Grants {
        &self.grants
    }

    /// Listens at a path.
    ///
    /// # Errors
    /// The access control is not granted; or the errors of [`Listener::bind_for`].
    pub fn listen(&self, path: &Path, access: &SocketAccess) -> Result<Listener, ListenError> {
        let failed = |errno| match errno {
            Errno::PERM => ListenError::Access(path.to_owned()),
            Errno::ADDRINUSE => ListenError::InUse(path.to_owned()),
            Errno::MSGSIZE => ListenError::TooLong(path.to_owned()),
            errno => ListenError::System {
                path: path.to_owned(),
                action: "have the socket made outside the sandbox",
                errno,
            },
        };
        Listener::bind_by(path, || {
            let number = self.grants.number(access).ok_or(Errno::PERM);
            let whole = self.here.join(path);
            let whole = whole.as_os_str().as_bytes();
            number
                .and_then(|number| self.spawner.request(number, whole))
                .map_err(failed)
        })
    }
}

/// Rights of the process that makes the sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketRights {
    /// Folders, without links.
    pub below: Vec<PathBuf>,
    accesses: Vec<Access>,
}

impl SocketRights {
    /// Returns the rights as arguments of a process.
    pub fn arguments(&self) -> Vec<OsString> {
        let below = self.below.iter().map(|place| {
            let mut argument = OsStr::from_bytes(BELOW).to_owned();
            argument.push(place);
            argument
        });
        let accesses = self.accesses.iter().map(|access| {
            let id = |id: Option<u32>| id.map(|id| id.to_string()).unwrap_or_default();
            let owner = id(access.owner.map(Uid::as_raw));
            let group = id(access.group.map(Gid::as_raw));
            format!("{ACCESS}{owner}:{group}:{:o}", access.mode.bits()).into()
        });
        below.chain(accesses).collect()
    }

    /// Parses the arguments of a process. `None` when one of them is unknown.
    pub fn parse(arguments: &[OsString]) -> Option<Self> {
        let mut rights = Self::default();
        for argument in arguments {
            match argument.as_bytes().strip_prefix(BELOW) {
                Some(place) => rights.below.push(OsStr::from_bytes(place).into()),
                None => {
                    let access = argument.to_str()?.strip_prefix(ACCESS)?;
                    rights.accesses.push(parse_access(access)?);
                }
            }
        }
        Some(rights)
    }

    /// Makes a socket for the serving process. `number` and `path` are untrusted.
    ///
    /// # Errors
    /// `PERM` when there is no such access control, or this user may not set it; `ACCESS` when the
    /// path is not below one of the folders; otherwise the error of the system call that failed.
    pub fn make(&self, number: u32, path: &[u8]) -> Result<OwnedFd, Errno> {
        let number = usize::try_from(number).map_err(|_| Errno::PERM)?;
        let access = self.accesses.get(number).ok_or(Errno::PERM)?;
        let path = Path::new(OsStr::from_bytes(path));
        let name = path.file_name().ok_or(Errno::INVAL)?;
        let folder = path.parent().filter(|folder| folder.is_absolute());
        let folder = folder.ok_or(Errno::INVAL)?.canonicalize();
        let folder = folder.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        // Landlock says so, too, where the kernel has it, also if the folder is replaced now.
        if !self.below.iter().any(|place| folder.starts_with(place)) {
            return Err(Errno::ACCESS);
        }
        bind_socket(&folder.join(name), access).map_err(|error| match error {
            ListenError::Access(_) => Errno::PERM,
            ListenError::InUse(_) => Errno::ADDRINUSE,
            ListenError::TooLong(_) => Errno::MSGSIZE,
            ListenError::System { errno, .. } => errno,
            _ => Errno::INVAL,
        })
    }
}

/// Parses `OWNER:GROUP:MODE`.
fn parse_access(text: &str) -> Option<Access> {
    let mut parts = text.split(':');
    let mut id = || match parts.next()? {
        "" => Some(None),
        // The largest number stands for "no change".
        number => number.parse().ok().filter(|id| *id != u32::MAX).map(Some),
    };
    let (owner, group) = (id()?, id()?);
    let mode = u32::from_str_radix(parts.next()?, 8).ok();
    let mode = mode.filter(|mode| *mode <= 0o777 && parts.next().is_none())?;
    Some(Access {
        owner: owner.map(Uid::from_raw),
        group: group.map(Gid::from_raw),
        mode: Mode::from_bits_truncate(mode),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_rights_survive_arguments() {
        let access = |owner: Option<u32>, group: Option<u32>, mode| Access {
            owner: owner.map(Uid::from_raw),
            group: group.map(Gid::from_raw),
            mode: Mode::from_bits_truncate(mode),
        };
        let rights = SocketRights {
            below: vec!["/run/vnvme".into(), "/srv/a b=:c".into()],
            accesses: vec![
                access(None, Some(104), 0o660),
                access(Some(0), None, 0o600),
                access(None, None, 0o666),
            ],
        };
        assert_eq!(SocketRights::parse(&rights.arguments()), Some(rights));
        for bad in [
            "--socket-access=1:2:1777",
            "--socket-access=1:2:7:7",
            "--socket-access=4294967295::600",
            "--socket-access=root::600",
            "--socket-access=1:2",
            "--other",
        ] {
            assert_eq!(SocketRights::parse(&[bad.into()]), None, "{bad}");
        }
    }

    /// The process refuses by itself what Landlock refuses, too, on kernels that have it.
    #[test]
    fn socket_outside_its_folders_or_rights_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let [below, beside] = ["below", "beside"].map(|name| directory.path().join(name));
        std::fs::create_dir(&below).unwrap();
        std::fs::create_dir(&beside).unwrap();
        std::os::unix::fs::symlink(&beside, below.join("link")).unwrap();
        let rights = SocketRights {
            below: vec![below.canonicalize().unwrap()],
            accesses: vec![Access::OWNER_ONLY],
        };
        let make = |number, path: &Path| {
            let made = rights.make(number, path.as_os_str().as_bytes());
            made.map(drop)
        };
        for path in ["beside/a.sock", "below/link/a.sock", "below/../a.sock"] {
            let path = directory.path().join(path);
            assert_eq!(make(0, &path), Err(Errno::ACCESS), "{path:?}");
            assert!(!path.exists());
        }
        let path = below.join("a.sock");
        assert_eq!(make(1, &path), Err(Errno::PERM));
        assert_eq!(make(0, &path), Ok(()));
    }
}
