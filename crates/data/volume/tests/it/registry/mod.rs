//! The registry of the kinds of volumes, with a kind that this program adds.

mod toy;

use dma::{Buffer, SegmentList};
use volume::{
    Extras, Io, IoOptions, Op, OpenError, OpenOptions, OpenedUrl, READ_ONLY, Registry, UrlOption,
};

fn registry() -> Registry<String> {
    Registry::new().with(toy::kind())
}

fn open(url: &str) -> Result<OpenedUrl<String>, OpenError> {
    registry().open(url, OpenOptions::default())
}

fn error(url: &str) -> String {
    match open(url) {
        Ok(_) => panic!("{url} was opened"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn new_volume_kind_needs_single_line() {
    let opened = open("zero://1M?colour=red&offset=64K&iops=10&read-only=on").unwrap();
    assert_eq!(opened.volume.info().size, (1 << 20) - (64 << 10));
    assert!(opened.volume.info().read_only);
    let io = Io::new(IoOptions::default());
    let mut queue = opened.volume.open(&io).unwrap();
    let data = SegmentList::owned(Buffer::new(4096));
    data.fill(1);
    let done = queue
        .start(1, Op::Read, 0, data)
        .expect("one of ten a second");
    let buffer = done.data.into_buffer().unwrap();
    assert!(done.result.is_ok() && buffer.iter().all(|&byte| byte == 0));
    assert_eq!(opened.attached.as_deref(), Some("red"));
    assert!(opened.extras.is_part() && opened.extras.is_limited());
    assert!(open("zero://1M").unwrap().attached.is_none());
    // Errors contain the known forms.
    for url in ["iscsi://host/1", "", "file://"] {
        let text = error(url);
        for form in ["file://PATH", "mem://SIZE", "null://SIZE", "zero://SIZE"] {
            assert!(text.contains(form), "{form}: {text}");
        }
    }
    let text = error("zero://1M?size=1");
    let known = "zero volumes have read-only, colour, unused, offset, length";
    assert!(text.contains(known), "{text}");
    assert!(error("zero://1M?colour=blue").contains("colour=blue: it is red or green"));
    assert!(error("zero://much").contains("whole number"));
    // A registry without the kind does not know it.
    let without = Registry::<()>::new().open("zero://1M", OpenOptions::default());
    assert!(matches!(without, Err(OpenError::Scheme { known, .. }) if !known.contains("zero")));
}

#[test]
fn option_without_effect_is_refused() {
    let text = error("zero://1M?unused=1");
    assert!(text.contains("\"unused\" has no effect"), "{text}");
}

#[test]
fn prefix_kind_opens_inner_url() {
    let mut kind = toy::kind();
    kind.scheme.name = "twice+";
    kind.scheme.form = "URL";
    kind.open = Box::new(|url, options| {
        // The options are those of the volume behind it.
        let inner = Registry::<String>::new().open(url.name, options)?;
        let text = url.take_text().to_owned();
        Ok(volume::BareVolume::attached(inner.volume, text))
    });
    let registry = registry().with(kind);
    let open = |url: &str| registry.open(url, OpenOptions::default());
    let opened = open("twice+null://1M?latency=1ms&length=64K").unwrap();
    assert_eq!(opened.volume.info().size, 64 << 10);
    assert_eq!(
        opened.attached.as_deref(),
        Some("twice+null://1M?latency=1ms")
    );
    let error = |url: &str| open(url).map(|_| ()).unwrap_err().to_string();
    assert!(error("twice+null://1M?colour=red").contains("null volumes have"));
    assert!(error("iscsi://host/1").contains("zero://SIZE, twice+URL"));
}

#[test]
fn volume_kind_can_be_replaced() {
    let mut kind = toy::kind();
    kind.scheme.name = "mem";
    let registry = registry().with(kind);
    let opened = registry.open("mem://1M?colour=green", OpenOptions::default());
    assert_eq!(opened.unwrap().attached.as_deref(), Some("green"));
    let schemes: Vec<&str> = registry.schemes().map(|scheme| scheme.name).collect();
    assert_eq!(schemes, ["file", "mem", "null", "zero"]);
}

/// Values of an option, as its form has them.
fn values(option: &UrlOption) -> Vec<&'static str> {
    let forms = option.form.split('|');
    forms.flat_map(|form| values_of(option, form)).collect()
}

fn values_of(option: &UrlOption, form: &'static str) -> Vec<&'static str> {
    match form {
        "SIZE" => vec!["4K"],
        "DURATION" => vec!["20ms"],
        "N" => vec!["2"],
        "NAME" => vec!["a%26b"],
        "GUID" => vec!["01234567-89ab-cdef-0123-456789abcdef"],
        "PATH" => vec!["/dev/null"],
        "KEYSOURCE" => vec!["/run/key", "cred:disk"],
        form if form.starts_with(|c: char| c.is_ascii_digit()) => vec![form],
        form if form.chars().all(|c| c.is_lowercase() || c == '-') => vec![form],
        form => panic!("{}={form} is no form that help knows", option.name),
    }
}

/// Help and constructors agree: each option of the table is read, in every form, and has an effect.
#[test]
fn every_documented_option_is_parsed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let mut count = 0;
    for scheme in Registry::<()>::new().schemes() {
        assert!(scheme.options.contains(&READ_ONLY), "{}", scheme.name);
        let name = match scheme.form {
            "SIZE" => "1M",
            "PATH" => path.to_str().unwrap(),
            form => panic!("{}://{form} is no form that help knows", scheme.name),
        };
        for option in scheme.options.iter().chain(Extras::OPTIONS) {
            for value in values(option) {
                let url = format!("{}://{name}?{}={value}", scheme.name, option.name);
                match open(&url).map_err(OpenError::without_name) {
                    // No partitions are there; not every file system can bypass its cache.
                    Ok(_) | Err(OpenError::Gpt { .. } | OpenError::Volume(_)) => count += 1,
                    // A weight needs a device that can be shared.
                    Err(OpenError::Value { key, .. }) if key == "weight" => count += 1,
                    // This registry opens no encrypted volumes.
                    Err(OpenError::Value { key, .. }) if key.starts_with("luks") => count += 1,
                    Err(error) => panic!("{url}: {error}"),
                }
            }
        }
    }
    assert!(count > 50, "{count}");
}
