//! URL scheme `rbd`, and the kind of volumes that it names.

use crate::ffi::Name;
use crate::settings::{Ports, Settings};
use crate::volume::{LockMode, RbdOptions, RbdVolume};
use remote::{Address, ConnectionKeeper, ReachWatch, RemoteKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use volume::{
    OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, Volume, VolumeUrl, parse_duration,
    parse_size,
};

/// URL scheme of images in Ceph clusters.
pub const RBD: Scheme = Scheme {
    name: "rbd",
    form: "POOL/IMAGE",
    example: "rbd://vms/disk0, rbd://pool/namespace/disk0@snapshot?id=vnvme",
    help: "image of a Ceph cluster through librbd (package librbd1); snapshots are read-only",
    options: &[READ_ONLY, CONF, ID, KEYRING, LOCK, WAIT, SIZE, PORTS],
};

const CONF: UrlOption = UrlOption::new(
    "conf",
    "PATH",
    "configuration of the cluster [default: that of librados, /etc/ceph/ceph.conf]",
);
const ID: UrlOption = UrlOption::new(
    "id",
    "NAME",
    "client name, NAME of client.NAME [default: admin]",
);
const KEYRING: UrlOption = UrlOption::new(
    "keyring",
    "PATH",
    "file of the client's key [default: as configured]",
);
const LOCK: UrlOption = UrlOption::new(
    "lock",
    "wait|break|off",
    "exclusive lock: wait until another client releases it, break it and blocklist its owner, or \
     do not lock [default: wait]",
);
const WAIT: UrlOption = UrlOption::new(
    "wait",
    "DURATION",
    "time to wait for the cluster at start-up [default: 5s]",
);
const SIZE: UrlOption = UrlOption::new(
    "size",
    "BYTES",
    "size of the image, used if the cluster does not answer at start-up: the disk is served and \
     its requests wait [default: none, the disk is refused]",
);
const PORTS: UrlOption = UrlOption::new(
    "ports",
    "FIRST-LAST",
    "ports of the cluster's daemons that the sandbox permits, beside those of its monitors \
     [default: ms_bind_port_min to ms_bind_port_max of the configuration]",
);

/// Images of Ceph clusters.
#[derive(Debug)]
pub struct Rbd;

impl RemoteKind for Rbd {
    fn schemes(&self) -> &'static [Scheme] {
        &[RBD]
    }

    fn open(
        &self,
        url: &mut VolumeUrl<'_>,
        options: OpenOptions,
        _: Option<Arc<dyn ConnectionKeeper>>,
    ) -> Result<(Arc<dyn Volume>, ReachWatch), OpenError> {
        let volume = open(url, options)?;
        let watch = volume.watch();
        Ok((Arc::new(volume), watch))
    }

    /// The library finds the servers of a cluster.
    fn servers(&self, _: &str) -> Option<Vec<Address>> {
        Some(Vec::new())
    }

    /// The image's lock has passed from the previous process to this one, and the cluster refuses
    /// requests of the previous owner.
    fn is_fenced(&self) -> bool {
        true
    }

    fn library_ports(&self, url: &str) -> Option<Vec<u16>> {
        let query = Query(url.rsplit_once('?').map_or("", |(_, query)| query));
        let settings = Settings {
            conf: query.get("conf").map(PathBuf::from),
            id: query.get("id").unwrap_or("admin").to_owned(),
            keyring: query.get("keyring").map(PathBuf::from),
            ports: query.get("ports").and_then(|text| text.parse().ok()),
        };
        // Errors are reported when the image is opened.
        Some(settings.ports().unwrap_or_default())
    }

    fn needs_start(&self) -> Option<&'static str> {
        Some(
            "in the sandbox the cluster's configuration and key cannot be read: images of Ceph \
             clusters belong into the configuration that the daemon starts with",
        )
    }
}

/// Parses the name of an image in a URL: `POOL/IMAGE`, `POOL/NAMESPACE/IMAGE`, either with
/// `@SNAPSHOT`.
fn name(text: &str) -> Option<Name> {
    let (image, snapshot) = match text.rsplit_once('@') {
        Some((image, snapshot)) => (image, Some(snapshot.to_owned())),
        None => (text, None),
    };
    let mut parts = image.split('/');
    let (pool, second, third) = (parts.next()?, parts.next()?, parts.next());
    let (namespace, image) = match third {
        Some(image) => (second, image),
        None => ("", second),
    };
    let name = Name {
        pool: pool.to_owned(),
        namespace: namespace.to_owned(),
        image: image.to_owned(),
        snapshot,
    };
    let given = |text: &str| !text.is_empty() && !text.contains('\0');
    let fine = given(pool)
        && given(image)
        && (third.is_none() || given(second))
        && name.snapshot.as_deref().is_none_or(given)
        && parts.next().is_none();
    fine.then_some(name)
}

/// Options of an `rbd` URL, as text.
struct Query<'a>(&'a str);

impl Query<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0
            .split('&')
            .find_map(|option| option.strip_prefix(key)?.strip_prefix('='))
    }
}

fn open(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<RbdVolume, OpenError> {
    let Some(name) = name(url.name) else {
        return Err(OpenError::Other(
            format!(
                "rbd://{}: an image is named rbd://POOL/IMAGE or rbd://POOL/NAMESPACE/IMAGE, and a \
                 snapshot of it with @SNAPSHOT behind",
                url.name
            )
            .into(),
        ));
    };
    let path = |text: &str| Ok(PathBuf::from(text));
    let id = |text: &str| {
        if text.is_empty() || text.starts_with("client.") {
            Err("it is NAME of client.NAME")
        } else {
            Ok(text.to_owned())
        }
    };
    let lock = |text: &str| match text {
        "wait" => Ok(LockMode::Wait),
        "break" => Ok(LockMode::Break),
        "off" => Ok(LockMode::Off),
        _ => Err("it is wait, break or off"),
    };
    let wait = |text: &str| match parse_duration(text)? {
        time if time > Duration::from_secs(300) => Err("it is at most 300s"),
        time => Ok(time),
    };
    let size = |text: &str| match parse_size(text)? {
        size if size > 0 && size.is_multiple_of(512) => Ok(size),
        _ => Err("it is a multiple of 512 bytes"),
    };
    let ports = |text: &str| text.parse::<Ports>();
    let default = RbdOptions::default();
    let settings = Settings {
        conf: url.options.take("conf", path)?,
        id: url
            .options
            .take("id", id)?
            .unwrap_or_else(|| "admin".into()),
        keyring: url.options.take("keyring", path)?,
        ports: url.options.take("ports", ports)?,
    };
    let is_snapshot = name.snapshot.is_some();
    let options = RbdOptions {
        read_only: url.options.read_only(&open)? || is_snapshot,
        lock: url.options.take("lock", lock)?.unwrap_or(default.lock),
        wait: url.options.take("wait", wait)?.unwrap_or(default.wait),
        size: url.options.take("size", size)?,
    };
    RbdVolume::open(name, settings, options).map_err(|error| OpenError::Other(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_urls_name_pool_namespace_and_snapshot() {
        let of = |pool: &str, namespace: &str, image: &str, snapshot: Option<&str>| Name {
            pool: pool.into(),
            namespace: namespace.into(),
            image: image.into(),
            snapshot: snapshot.map(Into::into),
        };
        assert_eq!(name("p/i"), Some(of("p", "", "i", None)));
        assert_eq!(name("p/n/i"), Some(of("p", "n", "i", None)));
        assert_eq!(name("p/n/i@s"), Some(of("p", "n", "i", Some("s"))));
        assert_eq!(name("p/i@a@s"), Some(of("p", "", "i@a", Some("s"))));
        for wrong in [
            "", "p", "p/", "/i", "p//i", "p/n/i/x", "p/i@", "p/n/@s", "p/\0",
        ] {
            assert_eq!(name(wrong), None, "{wrong:?}");
        }
    }
}
