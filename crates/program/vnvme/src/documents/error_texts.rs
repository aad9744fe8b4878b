//! Test that no error message repeats its source, because `{:#}` prints an error with all of its
//! sources.

use std::path::{Path, PathBuf};

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the messages that contain their source, as pairs of message and source field.
fn said_twice(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut parts = text.split("#[error(");
    parts.next();
    for part in parts {
        let Some((message, variant)) = part.split_once(")]\n") else {
            continue;
        };
        // Ends at the next variant's documentation, or the end of the enumeration.
        let end = variant.find("\n    /// ").unwrap_or(variant.len());
        let end = end.min(variant.find("\n}").unwrap_or(variant.len()));
        let variant = variant.get(..end).unwrap_or(variant);
        let tuple = variant.contains("(#[from]") || variant.contains("(#[source]");
        // A field with this name is the source, even without an attribute.
        let named = message.contains("{source}");
        let marked = variant.split("#[source]").nth(1).is_some_and(|field| {
            let name = field.trim_start().trim_start_matches("pub ");
            let name = name.split(':').next().unwrap_or_default();
            !name.is_empty() && message.contains(&format!("{{{name}}}"))
        });
        if named || marked || (tuple && message.contains("{0")) {
            found.push((message.into(), variant.trim().into()));
        }
    }
    found
}

#[test]
fn errors_do_not_repeat_their_source() {
    for twice in [
        "#[error(\"a: {source}\")]\n    A { source: E },\n}",
        "#[error(\"a: {0}\")]\n    A(#[from] E),\n}",
        "#[error(\"a: {why}\")]\n    A {\n        #[source]\n        why: E,\n    },\n}",
    ] {
        assert_eq!(said_twice(twice).len(), 1, "{twice}");
    }
    let once =
        "#[error(\"a\")]\n    A(#[from] E),\n    /// B.\n    #[error(\"b {0}\")]\n    B(u32),\n}";
    assert!(said_twice(once).is_empty());

    let mut files = Vec::new();
    sources(
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")),
        &mut files,
    );
    let mut messages = 0;
    for file in files
        .iter()
        .filter(|file| !file.ends_with("vnvme/src/error_texts.rs"))
    {
        let text = std::fs::read_to_string(file).unwrap();
        messages += text.matches("#[error(").count();
        let twice = said_twice(&text);
        assert!(twice.is_empty(), "{}: {twice:#?}", file.display());
    }
    assert!(messages > 100, "the sources are not read: {messages}");
}
