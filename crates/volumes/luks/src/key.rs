//! Sources of passphrases: files, named pipes, and systemd credentials.

use crate::error::LuksError;
use crate::secret::SecretBytes;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// Largest passphrase in bytes, as cryptsetup bounds key files.
const MAX_PASSPHRASE: usize = 8 << 20;
/// Permission bits of users other than owner and group.
const OTHER_USERS_MODE: u32 = 0o007;
/// Prefix of the name of a systemd credential.
const CREDENTIAL: &str = "cred:";
/// Environment variable with the folder of a service's credentials (systemd.exec(5)).
const CREDENTIALS_FOLDER: &str = "CREDENTIALS_DIRECTORY";

/// Where the passphrase of a container is read from. The whole content is the passphrase, a final
/// line break included, as for `cryptsetup --key-file`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// File or named pipe. A pipe is read until its writer closes it.
    File(PathBuf),
    /// Credential that systemd has passed to the service.
    Credential(String),
}

impl KeySource {
    /// Parses `PATH` or `cred:NAME`.
    ///
    /// # Errors
    /// The reason why the text names no source.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        match text.strip_prefix(CREDENTIAL) {
            None if text.is_empty() => Err("a path or cred:NAME is expected"),
            None => Ok(Self::File(text.into())),
            // systemd.exec(5): a credential is a file of this name in one folder.
            Some("" | "." | "..") => Err("a credential has a name"),
            Some(name) if name.contains('/') => Err("the name of a credential has no slash"),
            Some(name) => Ok(Self::Credential(name.to_owned())),
        }
    }

    /// Returns the path of the file, or of the credential.
    ///
    /// # Errors
    /// There are no credentials: systemd did not start this process, or with none.
    pub fn path(&self) -> io::Result<PathBuf> {
        match self {
            Self::File(path) => Ok(path.clone()),
            Self::Credential(name) => {
                let folder = std::env::var_os(CREDENTIALS_FOLDER).ok_or_else(|| {
                    let why = "systemd has passed no credentials to this process; set \
                               LoadCredential= or LoadCredentialEncrypted= in its unit";
                    io::Error::new(ErrorKind::NotFound, why)
                })?;
                Ok(PathBuf::from(folder).join(name))
            }
        }
    }

    /// Checks without reading that the source is there, and that only its owner and group may read
    /// it.
    ///
    /// # Errors
    /// [`LuksError::Key`].
    pub fn check(&self) -> Result<(), LuksError> {
        let found = self.path().and_then(|path| path.metadata());
        let checked = found.and_then(|metadata| {
            if metadata.is_file() || metadata.file_type().is_fifo() {
                private(metadata.mode())
            } else {
                Err(io::Error::other("neither a file nor a named pipe"))
            }
        });
        checked.map_err(|error| self.error(error))
    }

    /// Reads the passphrase. Waits for the writer of a named pipe.
    ///
    /// # Errors
    /// [`LuksError::Key`] when it cannot be read, is empty or too long, or every user may read it.
    pub fn read(&self) -> Result<SecretBytes, LuksError> {
        self.check()?;
        self.read_all().map_err(|error| self.error(error))
    }

    fn read_all(&self) -> io::Result<SecretBytes> {
        let mut file = File::open(self.path()?)?;
        // The file that was opened, whatever is at the path by now.
        private(file.metadata()?.mode())?;
        // Memory that is not written is never allocated by the system.
        let mut passphrase = SecretBytes::new(MAX_PASSPHRASE + 1);
        let mut len = 0;
        while let Some(room) = passphrase.get_mut(len..).filter(|room| !room.is_empty()) {
            match file.read(room) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        match len {
            0 => Err(io::Error::other("it is empty")),
            1..=MAX_PASSPHRASE => Ok(SecretBytes::copy_of(
                passphrase.get(..len).unwrap_or_default(),
            )),
            _ => Err(io::Error::other("it is longer than 8 MiB")),
        }
    }

    fn error(&self, error: io::Error) -> LuksError {
        let source_name = self.to_string();
        LuksError::Key { source_name, error }
    }
}

fn private(mode: u32) -> io::Result<()> {
    if mode & OTHER_USERS_MODE == 0 {
        return Ok(());
    }
    Err(io::Error::new(
        ErrorKind::PermissionDenied,
        "every user may access it, and it holds a secret (chmod 600)",
    ))
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Credential(name) => write!(f, "{CREDENTIAL}{name}"),
        }
    }
}
