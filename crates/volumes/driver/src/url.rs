//! Device URLs: `nvme://0000:44:00.0/1`, `vfio-user:///run/disk.sock/1`, with `?key=value&...`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use volume::{Scheme, UrlOption};

use crate::device::Device;
use crate::error::Error;
use crate::options::{Options, QueueOptions};
use crate::transport::{Transport, TransportError};
use crate::vfio_user::VfioUser;
use crate::volume::NvmeVolume;

/// Time limit for each message to a vfio-user server.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// URL scheme `nvme`, a PCI function through VFIO, for a [`volume::Registry`].
pub const NVME: Scheme = Scheme {
    name: "nvme",
    form: "ADDRESS/NSID",
    example: "nvme://0000:44:00.0/1",
    help: "namespace 1 of a real NVMe device through VFIO (see vnvme bind)",
    options: OPTIONS,
};

/// URL scheme `vfio-user`, a controller behind a vfio-user socket.
pub const VFIO_USER: Scheme = Scheme {
    name: "vfio-user",
    form: "/SOCKET/NSID",
    example: "vfio-user:///run/b.sock/1",
    help: "namespace 1 of a controller behind another vfio-user socket",
    options: OPTIONS,
};

/// URL options that every transport accepts.
const OPTIONS: &[UrlOption] = &[
    volume::READ_ONLY,
    UrlOption::new("queues", "N", "I/O queue pairs to ask for [default: 64]"),
    UrlOption::new(
        "depth",
        "N",
        "outstanding commands of each queue pair [default: 128]",
    ),
    UrlOption::new(
        "max-transfer",
        "SIZE",
        "maximum transfer size, if the device allows more [default: 1M]",
    ),
    UrlOption::new(
        "shadow",
        "on|off",
        "use shadow doorbells if the device offers them [default: on]",
    ),
    UrlOption::new(
        "sgl",
        "on|off",
        "use SGLs if the device supports them and they are shorter than PRP lists [default: on]",
    ),
    UrlOption::new(
        "interrupts",
        "on|off",
        "sleep until an interrupt; off polls [default: on]",
    ),
    UrlOption::new(
        "timeout",
        "DURATION",
        "time limit of a command, after which it is aborted [default: 30s]",
    ),
    UrlOption::new(
        "status-interval",
        "DURATION",
        "interval of controller status reads while commands are outstanding [default: 250ms]",
    ),
];

/// Reason why a URL could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The text is not a device URL.
    #[error(
        "{url}: not the URL of a device, like nvme://0000:44:00.0/1 or \
             vfio-user:///path/to.sock/1"
    )]
    Form {
        /// Text that is not a device URL.
        url: String,
    },
    /// An option is unknown or has an invalid value.
    #[error("option \"{text}\": {why}")]
    Option {
        /// Option as given in the URL.
        text: String,
        /// Reason why the option is invalid.
        why: String,
    },
    /// The device could not be reached.
    #[error("{name}: cannot be reached")]
    Transport {
        /// Name of the device that cannot be reached.
        name: String,
        /// Error of the transport to the device.
        #[source]
        source: TransportError,
    },
    /// The URL needs VFIO, and this program was built without it.
    #[error("{name}: this program was built without VFIO (cargo feature \"vfio\")")]
    NotBuilt {
        /// Name of the device that needs VFIO.
        name: String,
    },
    /// VFIO could not open the device.
    #[error(transparent)]
    Vfio(#[from] crate::vfio::VfioError),
    /// The controller was reached, but could not be initialized.
    #[error("{name}: cannot be used")]
    Device {
        /// Name of the device that cannot be initialized.
        name: String,
        /// Error of the driver.
        #[source]
        source: Error,
    },
}

/// Address of an NVMe controller that a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerAddress {
    /// PCI address of a function that is accessed through VFIO.
    Pci(crate::vfio::Bdf),
    /// Path of a vfio-user socket.
    Socket(PathBuf),
}

/// A parsed device URL: controller, namespace and options.
#[derive(Clone, Debug)]
pub struct DeviceTarget {
    /// Address of the controller.
    pub place: ControllerAddress,
    /// Namespace ID in the controller, 1 by default.
    pub nsid: u32,
    /// Options of the driver for the controller.
    pub options: Options,
    /// Options of the controller's queue pairs.
    pub queue: QueueOptions,
    /// Whether all writes are refused.
    pub read_only: bool,
}

impl DeviceTarget {
    /// Parses a URL.
    ///
    /// | URL | device |
    /// |---|---|
    /// | `nvme://DDDD:BB:DD.F/NSID` | PCI function, through VFIO (also with three slashes) |
    /// | `vfio-user:///PATH/NSID` | vfio-user socket |
    ///
    /// The namespace may be left out. The options are those of [`NVME`] and [`VFIO_USER`].
    ///
    /// # Errors
    /// [`OpenError::Form`] when the text is no device URL; [`OpenError::Option`] when an option is
    /// unknown or invalid.
    pub fn parse(url: &str) -> Result<Self, OpenError> {
        let form = || OpenError::Form { url: url.into() };
        let (scheme, rest) = url.split_once("://").ok_or_else(form)?;
        let (name, query) = match rest.split_once('?') {
            Some((name, query)) => (name, query),
            None => (rest, ""),
        };
        let (base, nsid) = match name.rsplit_once('/') {
            Some((base, last))
                if !base.is_empty()
                    && last.bytes().all(|b| b.is_ascii_digit())
                    && !last.is_empty() =>
            {
                let nsid = last.parse().ok().filter(|&nsid| nsid > 0);
                (base, nsid.ok_or_else(form)?)
            }
            _ => (name, 1),
        };
        let place = match scheme {
            _ if scheme == NVME.name => {
                let address = base.strip_prefix('/').unwrap_or(base);
                ControllerAddress::Pci(address.parse().map_err(|_| form())?)
            }
            _ if scheme == VFIO_USER.name && base.starts_with('/') && base.len() > 1 => {
                ControllerAddress::Socket(base.into())
            }
            _ => return Err(form()),
        };
        let mut target = Self {
            place,
            nsid,
            options: Options::default(),
            queue: QueueOptions::default(),
            read_only: false,
        };
        for text in query.split('&').filter(|text| !text.is_empty()) {
            target.option(text)?;
        }
        Ok(target)
    }

    /// Returns whether the scheme of a URL is `nvme` or `vfio-user`.
    pub fn is_named_by(url: &str) -> bool {
        let scheme = url.split_once("://").map(|(scheme, _)| scheme);
        scheme == Some(NVME.name) || scheme == Some(VFIO_USER.name)
    }

    fn option(&mut self, text: &str) -> Result<(), OpenError> {
        let wrong = |why: &str| OpenError::Option {
            text: text.into(),
            why: why.into(),
        };
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| wrong("options are written key=value, and separated by &"))?;
        let unknown = || {
            let known: Vec<&str> = OPTIONS.iter().map(|option| option.name).collect();
            wrong(&format!("unknown; known are {}", known.join(", ")))
        };
        // Options that help does not list do not exist.
        if !OPTIONS.iter().any(|option| option.name == key) {
            return Err(unknown());
        }
        let switch = || match value {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(wrong("it is on or off")),
        };
        let number = |most: u32| {
            let value = value.parse::<u32>().ok();
            let value = value.filter(|n| (1..=most).contains(n));
            value.ok_or_else(|| wrong(&format!("a number from 1 to {most} is expected")))
        };
        match key {
            "queues" => self.options.io_queues = number(65_534)? as u16,
            "depth" => self.queue.depth = number(32_767)?,
            "max-transfer" => {
                self.options.max_transfer = volume::parse_size(value).map_err(wrong)?
            }
            "shadow" => self.options.doorbells.shadow = switch()?,
            "sgl" => self.options.sgl = switch()?,
            "interrupts" => {
                self.options.interrupts = switch()?;
                self.queue.interrupts = self.options.interrupts;
            }
            "timeout" | "status-interval" => {
                let duration = volume::parse_duration(value).map_err(wrong)?;
                if duration < Duration::from_millis(1) {
                    return Err(wrong("a millisecond is the least"));
                }
                match key {
                    "timeout" => self.options.command_timeout = duration,
                    _ => self.options.status_interval = duration,
                }
            }
            "read-only" => self.read_only = switch()?,
            _ => return Err(unknown()),
        }
        Ok(())
    }

    /// Returns a short name of the device for messages.
    pub fn name(&self) -> String {
        match &self.place {
            ControllerAddress::Pci(address) => format!("nvme://{address}/{}", self.nsid),
            ControllerAddress::Socket(path) => {
                format!("vfio-user://{}/{}", path.display(), self.nsid)
            }
        }
    }

    /// Connects to the controller and initializes it.
    ///
    /// # Errors
    /// [`OpenError`] when the transport cannot be opened, or the controller cannot be initialized.
    pub fn open(&self) -> Result<Device, OpenError> {
        let name = self.name();
        let transport: Arc<dyn Transport> = match &self.place {
            #[cfg(feature = "vfio")]
            ControllerAddress::Pci(address) => Arc::new(crate::vfio::Vfio::open(
                *address,
                &crate::vfio::VfioOptions::default(),
            )?),
            #[cfg(not(feature = "vfio"))]
            ControllerAddress::Pci(_) => return Err(OpenError::NotBuilt { name }),
            ControllerAddress::Socket(path) => match VfioUser::connect(path, MESSAGE_TIMEOUT) {
                Ok(transport) => transport,
                Err(source) => return Err(OpenError::Transport { name, source }),
            },
        };
        Device::open(transport, self.options.clone())
            .map_err(|source| OpenError::Device { name, source })
    }
}

/// Opens the namespace that a URL names (see [`DeviceTarget::parse`]) as a volume.
///
/// # Errors
/// [`OpenError`] when the URL is invalid, or the device or namespace cannot be opened.
pub fn open(url: &str) -> Result<NvmeVolume, OpenError> {
    let target = DeviceTarget::parse(url)?;
    let device = target.open()?;
    let name = target.name();
    NvmeVolume::new(
        device,
        target.nsid,
        target.queue,
        target.read_only,
        name.clone(),
    )
    .map_err(|source| OpenError::Device { name, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_urls_are_parsed() {
        for url in [
            "nvme://0000:44:00.0/1",
            "nvme:///0000:44:00.0/1",
            "nvme://0000:44:00.0",
        ] {
            let target = DeviceTarget::parse(url).unwrap();
            assert_eq!(
                (target.name().as_str(), target.nsid),
                ("nvme://0000:44:00.0/1", 1)
            );
        }
        let target = DeviceTarget::parse(
            "vfio-user:///run/a.sock/12?depth=4&shadow=off&timeout=2s&read-only=on",
        )
        .unwrap();
        assert_eq!(
            target.place,
            ControllerAddress::Socket("/run/a.sock".into())
        );
        assert_eq!(
            (target.nsid, target.queue.depth, target.read_only),
            (12, 4, true)
        );
        assert!(!target.options.doorbells.shadow);
        assert_eq!(target.options.command_timeout, Duration::from_secs(2));
        let target = DeviceTarget::parse("vfio-user:///run/a.sock").unwrap();
        assert_eq!(
            (target.place, target.nsid),
            (ControllerAddress::Socket("/run/a.sock".into()), 1)
        );
    }

    /// Checks that the help lists every option that the parser accepts.
    #[test]
    fn every_documented_option_is_parsed() {
        for option in OPTIONS {
            let values = match option.form {
                "SIZE" => "128k",
                "DURATION" => "20ms",
                "N" => "2",
                alternatives => alternatives,
            };
            for value in values.split('|') {
                let url = format!("vfio-user:///a.sock/1?{}={value}", option.name);
                let target = DeviceTarget::parse(&url).unwrap();
                let differs = format!("{target:?}") != format!("{:?}", plain());
                let default = if option.name == "read-only" {
                    "off"
                } else {
                    "on"
                };
                assert_eq!(differs, value != default, "{url}");
            }
        }
    }

    fn plain() -> DeviceTarget {
        DeviceTarget::parse("vfio-user:///a.sock/1").unwrap()
    }

    #[test]
    fn malformed_url_error_names_problem() {
        for url in [
            "",
            "nvme://",
            "nvme://x/1",
            "nvme://0000:44:00.0/0",
            "vfio-user://relative/1",
            "vfio-user:///",
            "file:///a/1",
            "nvme://0000:44:00.0/99999999999",
        ] {
            assert!(
                matches!(DeviceTarget::parse(url), Err(OpenError::Form { .. })),
                "{url}"
            );
        }
        for option in [
            "depth",
            "depth=0",
            "depth=x",
            "queues=65535",
            "shadow=yes",
            "timeout=0",
            "colour=red",
            "nsid=1",
            "max-transfer=-1",
        ] {
            let url = format!("vfio-user:///a.sock/1?{option}");
            assert!(
                matches!(DeviceTarget::parse(&url), Err(OpenError::Option { .. })),
                "{option}"
            );
        }
    }
}
