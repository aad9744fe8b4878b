//! Optional parts of the program: the cargo features `vfio`, `ublk`, `vhost-user-blk` and `qcow2`.
//!
//! Options, configuration and the rest of the program are the same in every build. In place of an
//! absent part, this module has types of its crate's names that cannot be constructed, and
//! [`check`] names the missing feature before anything is opened. (`driver` does the same for
//! `vfio`.)

#[cfg(feature = "ublk")]
pub(crate) use ::ublk;
#[cfg(not(feature = "ublk"))]
pub(crate) mod ublk;
#[cfg(feature = "qcow2")]
pub(crate) use ::qcow2;
#[cfg(not(feature = "qcow2"))]
pub(crate) mod qcow2;
#[cfg(feature = "vhost-user-blk")]
pub(crate) use ::vhost_blk;
#[cfg(not(feature = "vhost-user-blk"))]
pub(crate) mod vhost_blk;

pub use self::ublk::remove as remove_ublk;

use crate::front::kind::front_end;
use anyhow::{Result, ensure};
use config::disk::{DiskSpec, Specs};

/// Implements the front-end of a part that this build does not contain: no value of it can exist.
#[cfg(not(all(feature = "ublk", feature = "vhost-user-blk")))]
macro_rules! absent_frontend {
    ($name:ty, $error:ty) => {
        impl ::worker::Frontend for $name {
            type Error = $error;

            fn poll(&mut self, _: std::time::Instant, _: &mut ::volume::Budget) -> bool {
                match *self {}
            }

            fn complete(&mut self, _: ::volume::Completion) {
                match *self {}
            }

            fn in_flight(&self) -> usize {
                match *self {}
            }

            fn arm(&mut self) -> bool {
                match *self {}
            }

            fn flush(&mut self) {
                match *self {}
            }

            fn is_drained(&self) -> bool {
                match *self {}
            }
        }
    };
}
#[cfg(not(all(feature = "ublk", feature = "vhost-user-blk")))]
use absent_frontend;

/// Returns the error message for a part that this build does not contain.
fn missing(what: &str, feature: &str) -> String {
    format!("{what}: this vnvme was built without it (cargo feature \"{feature}\")")
}

/// Refuses disks that need a part which is absent from this build.
///
/// # Errors
/// A sentence for the user, which names the feature.
pub fn check(specs: &Specs) -> Result<()> {
    for disk in DiskSpec::all(specs) {
        let kind = disk.kind().name();
        ensure!(front_end(&disk).is_built(), missing(kind, kind));
    }
    Ok(())
}

/// Refuses to bind or unbind devices where nothing could drive them.
///
/// # Errors
/// As [`check`].
pub fn check_vfio() -> Result<()> {
    ensure!(cfg!(feature = "vfio"), missing("VFIO", "vfio"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers the present build: `make test-guests` runs the test with all parts and with none.
    #[test]
    fn missing_feature_is_named() {
        let specs = |text: &str| -> Specs { toml::from_str(text).unwrap() };
        for (part, feature, built) in [
            (
                check(&specs("[[ublk]]\nvolume = \"a\"")),
                "ublk",
                cfg!(feature = "ublk"),
            ),
            (
                check(&specs("[[vhost-user-blk]]\nsocket = \"s\"\nvolume = \"a\"")),
                "vhost-user-blk",
                cfg!(feature = "vhost-user-blk"),
            ),
            (check_vfio(), "vfio", cfg!(feature = "vfio")),
        ] {
            match part {
                Ok(()) => assert!(built, "{feature}"),
                Err(error) => {
                    assert!(!built, "{feature}");
                    let wanted = format!("(cargo feature \"{feature}\")");
                    assert!(error.to_string().ends_with(&wanted), "{error}");
                }
            }
        }
        let device = driver::DeviceTarget::parse("nvme://0000:ff:1f.7/1").unwrap();
        let error = device.open().map(drop).unwrap_err().to_string();
        let named = error.contains("(cargo feature \"vfio\")");
        assert_eq!(named, !cfg!(feature = "vfio"), "{error}");
    }
}
