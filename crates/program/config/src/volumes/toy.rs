//! Protocol of network volumes that only tests contain, made as CONTRIBUTING.md describes: an
//! implementation of [`RemoteKind`], and its line in [`KINDS`](super::KINDS).

use super::{KINDS, Kind, is_within, option_names, remote, remotes, servers};
use remote::{
    Address, ConnectionKeeper, ConnectionState, HostPort, ReachWatch, Reachable, RemoteKind,
    volume_kinds,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use volume::{
    MemVolume, OpenError, OpenOptions, READ_ONLY, Registry, Scheme, UrlOption, Volume, VolumeUrl,
};

/// Protocol whose volumes are in memory: no server is asked.
#[derive(Debug)]
pub struct Toy;

const TOY: Scheme = Scheme {
    name: "toy",
    form: "HOST:PORT",
    example: "toy://10.0.0.2:7",
    help: "volume in memory that only tests contain",
    options: &[READ_ONLY, COLOUR],
};

const COLOUR: UrlOption = UrlOption::new("colour", "TEXT", "colour of the volume");

struct NoConnection;

impl Reachable for NoConnection {
    fn reach(&self) -> Option<ConnectionState> {
        None
    }
}

impl RemoteKind for Toy {
    fn schemes(&self) -> &'static [Scheme] {
        &[TOY]
    }

    fn open(
        &self,
        url: &mut VolumeUrl<'_>,
        options: OpenOptions,
        _: Option<Arc<dyn ConnectionKeeper>>,
    ) -> Result<(Arc<dyn Volume>, ReachWatch), OpenError> {
        url.options.take("colour", |text| Ok(text.to_owned()))?;
        url.options.read_only(&options)?;
        let volume = MemVolume::new(1 << 20).map_err(OpenError::Volume)?;
        Ok((Arc::new(volume), ReachWatch::new(Arc::new(NoConnection))))
    }

    fn servers(&self, url: &str) -> Option<Vec<Address>> {
        let (_, rest) = url.split_once("://")?;
        let place = rest.split(['/', '?']).next()?;
        let place = HostPort::parse(place, 7).ok()?;
        Some(vec![place.into()])
    }

    fn is_fenced(&self) -> bool {
        false
    }
}

#[test]
fn toy_protocol_is_known_by_its_line() {
    assert!(option_names().any(|name| name == COLOUR.name));
    let url = "toy://10.0.0.2/?colour=red&iops=5";
    let kind = remote(url).unwrap();
    assert!(!kind.is_fenced() && !is_within(url));
    assert_eq!(servers(url), servers("toy://10.0.0.2:7/"));
    assert_eq!(servers(url).len(), 1);
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let entered = move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    };
    let kinds = volume_kinds(kind, entered, None);
    let registry = kinds.fold(Registry::<()>::new(), Registry::with);
    let volume = registry.open(url, OpenOptions::default()).unwrap().volume;
    assert_eq!(volume.info().size, 1 << 20);
    assert_eq!(opened.load(Ordering::Relaxed), 1);
    let error = registry.open("toy://10.0.0.2/?color=red", OpenOptions::default());
    let error = error.map(drop).unwrap_err().to_string();
    assert!(error.contains("colour"), "{error}");
}

/// The documented protocols, whether their servers are named in the URL, and whether a next process
/// may execute outstanding requests again.
#[test]
fn documented_protocols_are_known_with_their_fences() {
    for (url, has_servers, is_fenced) in [
        ("nbd://10.0.0.2/export", true, true),
        ("nbd+unix:///export?socket=/run/nbd", true, true),
        (
            "nvme+tcp://10.0.0.2/nqn.2014-08.org.vnvme:far/1",
            true,
            false,
        ),
        ("rbd://pool/image", false, true),
    ] {
        let kind = remote(url).expect(url);
        assert_eq!(kind.is_fenced(), is_fenced, "{url}");
        assert_eq!(!servers(url).is_empty(), has_servers, "{url}");
    }
}

/// Users write a server's address alone into `allow`.
#[test]
fn server_address_alone_names_server_of_every_protocol() {
    for kind in remotes() {
        for scheme in kind.schemes() {
            let first = scheme.example.split(", ").next().unwrap();
            let named = kind.servers(first).unwrap();
            for address in named {
                let url = match &address {
                    Address::Tcp { host, port } => format!("{}://{host}:{port}/", scheme.name),
                    Address::Unix(path) => {
                        format!("{}:///?socket={}", scheme.name, path.display())
                    }
                };
                assert_eq!(servers(&url), [address], "{url}");
            }
        }
    }
}

#[test]
fn schemes_are_unique_and_select_their_kind() {
    let mut schemes = Vec::new();
    for kind in KINDS {
        for scheme in kind.schemes() {
            assert!(!schemes.contains(&scheme.name), "{}", scheme.name);
            schemes.push(scheme.name);
            let found = Kind::of(&scheme.url()).unwrap();
            assert_eq!(found.schemes(), kind.schemes());
        }
    }
    assert!(
        ["a.raw", "file:///a", "mem://1M", "nbd.raw"]
            .iter()
            .all(|url| Kind::of(url).is_none())
    );
}
