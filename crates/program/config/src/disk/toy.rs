//! Kind of disk that only tests contain, made as CONTRIBUTING.md describes: a structure, its table
//! of options, and what [`Disk`] asks.

use super::{Address, Disk, DiskTable, disk_fields, disk_name};
use crate::access::SocketAccess;
use crate::check::UniqueValues;
use crate::options::tables::{name, socket, socket_mode, volume};
use crate::options::{Row, Spec, Url, file};
use crate::origin::Origin;
use crate::spec::NamespaceSpec;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::slice;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ToySpec {
    name: Option<String>,
    socket: PathBuf,
    access: SocketAccess,
    namespace: NamespaceSpec,
    colour: Option<String>,
    manual: Option<PathBuf>,
    origin: Origin,
}

impl Spec for ToySpec {
    const TABLE: &'static str = "[[toy]]";
    const NAMES: &'static str = "toys";
    const ABOUT: &'static str = "A toy; there may be several.";
    const ROWS: &'static [Row<Self>] = &[
        name::<Self>(|t| &mut t.name).or("the name of the socket's file, without .sock"),
        socket(|t| &mut t.socket),
        socket_mode(|t| &mut t.access.mode),
        volume(|t| &mut t.namespace.volume),
        Row::<Self>::new("colour", "TEXT", "colour, unique in the process", |t| {
            &mut t.colour
        })
        .or("none")
        .in_url(),
        Row::<Self>::new("manual", "PATH", "file that explains the toy", |t| {
            &mut t.manual
        })
        .or("none"),
    ];

    fn volume(&mut self) -> Option<&mut Url> {
        Some(&mut self.namespace.volume)
    }
}

impl ToySpec {
    fn any_name(&self) -> String {
        let own = self.name.clone();
        own.unwrap_or_else(|| disk_name(&self.socket))
    }
}

impl Disk for ToySpec {
    disk_fields!();

    fn address(&self) -> Address<'_> {
        Address::Socket(&self.socket, &self.access)
    }

    fn namespaces(&self) -> &[NamespaceSpec] {
        slice::from_ref(&self.namespace)
    }

    fn namespaces_mut(&mut self) -> &mut [NamespaceSpec] {
        slice::from_mut(&mut self.namespace)
    }

    fn own_files(&self) -> Vec<(&'static str, PathBuf)> {
        let manual = self.manual.clone();
        manual.into_iter().map(|path| ("manual", path)).collect()
    }

    fn check(&self, seen: &mut UniqueValues<'_>) -> Result<()> {
        let colour = self.colour.as_deref();
        let entered = colour.map_or(Ok(()), |colour| seen.enter("colour", colour, colour));
        self.origin.place("colour", entered)
    }
}

fn parse(text: &str) -> Result<ToySpec, toml::de::Error> {
    file::table(toml::Value::Table(toml::from_str(text)?))
}

#[test]
fn toy_disk_is_parsed_by_its_table() {
    let text = "socket = \"/run/a.sock\"\nsocket-mode = \"0660\"\nmanual = \"/m\"\n\
                volume = \"a.raw?colour=red&iops=5\"\n";
    let mut toy = parse(text).unwrap();
    toy.take_url_options().unwrap();
    assert_eq!(toy.colour.as_deref(), Some("red"));
    toy.complete();
    let again = parse(&file::to_table(&toy).to_string()).unwrap();
    assert_eq!(again, toy);
    let disk: &dyn Disk = &toy;
    assert_eq!((&*disk.name(), disk.volumes()), ("a", vec!["a.raw?iops=5"]));
    assert_eq!(disk.socket(), Some(Path::new("/run/a.sock")));
    assert!(disk.access().is_some_and(|access| !access.is_usual()));
    let files = ["a.raw", "a.raw?iops=5", "/m"].map(PathBuf::from);
    assert_eq!(disk.files(), files);
    let error = parse("socket = \"s\"\nvolume = \"v\"\ncolor = \"red\"\n").unwrap_err();
    assert!(error.message().contains("`colour`"), "{error}");
}

#[test]
fn toy_disk_with_colour_of_another_is_refused() {
    let toy = |colour: &str| {
        let text = format!("socket = \"/run/a\"\nvolume = \"v\"\ncolour = \"{colour}\"\n");
        parse(&text).unwrap()
    };
    let mut seen = UniqueValues::new(&|_| false);
    toy("red").check(&mut seen).unwrap();
    toy("blue").check(&mut seen).unwrap();
    let error = toy("red").check(&mut seen).unwrap_err();
    assert_eq!(error.to_string(), "the colour red is given twice");
}
