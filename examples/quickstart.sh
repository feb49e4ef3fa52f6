#!/usr/bin/env bash
# Train a small GPT on the CPU of this machine, from text to model: corpus,
# vocabulary, dataset, training on 8 processes (tensor 2 x pipeline 2 x data 2),
# a checkpoint, a resume from the checkpoint, a sample of generated text, and
# next steps. After the installation, this takes two to three minutes on 2 cores
# and 45 MB of disk.
#
#   bash examples/quickstart.sh [--text FILE|FOLDER [--column NAME]
#                               [--encoding NAME] [--errors HOW]]
#                               [--short] [--folder DIR]
#
#   --text PATH      file or folder with your own text: .txt, .md, .jsonl, .csv,
#                    .parquet, source code and other text files. Files that
#                    cannot be read are skipped and counted. The default corpus
#                    is the source code of Python's standard library.
#   --column NAME    column (.csv, .parquet) or key (.jsonl) that contains the
#                    text (text)
#   --encoding NAME  encoding of all files, such as cp1252 or utf-16; by default
#                    it is detected and printed for each file
#   --errors HOW     treatment of bytes that are invalid in the encoding: replace
#                    (default: they become U+FFFD, and are counted), ignore,
#                    backslashreplace, or strict (the text is left out)
#   --short          train only a few iterations, to check that everything works
#   --folder DIR     folder for all files (./quickstart-data; with --text
#                    ./quickstart-NAME)
#
# The first start downloads the required packages into .venv. Nothing else is
# downloaded. tools/setup_env.sh describes how to select the Python, or how to
# use the active environment.
set -euo pipefail

say() { printf '\n== %s\n' "$1"; }

fail() { echo "quickstart.sh: $1" >&2 && exit 2; }

folder="" text="" column="" encoding=() iterations=150 more=20 log_interval=10
while (($#)); do
    case $1 in
        --short) iterations=12 more=4 log_interval=2 ;;
        --folder) folder=${2:?--folder needs a folder} && shift ;;
        --text) text=${2:?--text needs a file or a folder} && shift ;;
        --column) column=${2:?--column needs a name} && shift ;;
        --encoding) encoding+=(--encoding "${2:?--encoding needs a name}") && shift ;;
        --errors) encoding+=(--errors "${2:?--errors needs a value}") && shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        *) fail "unknown argument $1; --help lists the arguments" ;;
    esac
    shift
done
[[ -z $column || -n $text ]] || fail "--column $column applies only to --text, which is not set"
[[ ${#encoding[@]} == 0 || -n $text ]] || fail "${encoding[*]} applies only to --text, which is not set"
encoding=(--errors replace ${encoding[@]+"${encoding[@]}"}) # the last value of a flag counts
[[ -z $text || -e $text ]] || fail "--text $text: there is no such file or folder"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/setup_env.sh"
if [[ -n $text ]]; then
    [[ $text == /* ]] || text=$PWD/$text
    name=$(basename "$text")
    folder=${folder:-quickstart-${name%.*}} column=${column:-text}
    say "Text: $text"
    facts=$(python "$root/examples/own_text.py" "$text" --column "$column" "${encoding[@]}") || exit 2 # before anything is written
fi
mkdir -p "${folder:=quickstart-data}"
folder=$(cd "$folder" && pwd) run=$folder/run
cd "$root"

# Build the corpus, vocabulary and dataset from the standard library. Files are split into documents, which are shuffled: as complete
# files, the validation set would be about 25 files that differ from the others.
prepare_library() {
    local corpus=$folder/corpus.jsonl vocabulary=$folder/vocabulary.model
    dataset=$folder/stdlib_text_document split=95,5,0 prompt='def read(self,'
    tokenizer=(--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$vocabulary")
    if [[ -f $corpus ]]; then
        say "Corpus: $corpus is there already"
    else
        say "Corpus: the source of Python's standard library, one file a line"
        python examples/make_corpus.py --output "$corpus"
    fi
    if [[ -f $vocabulary ]]; then
        say "Vocabulary: $vocabulary is there already"
    else
        say "Vocabulary: 4,096 sentencepiece tokens"
        python tools/train_tokenizer.py --input "$corpus" --output "$vocabulary" --kind sentencepiece-bpe --vocab-size 4096 \
            --max-bytes 4000000
    fi
    if [[ -f $dataset.bin && -f $dataset.idx ]]; then
        say "Dataset: $dataset.bin and .idx are there already"
    else
        say "Dataset: the corpus as tokens, in a file of tokens (.bin) and an index (.idx)"
        python tools/preprocess_data.py --input "$corpus" --output-prefix "${dataset%_text_document}" --append-eod --workers 2 \
            --shuffle-seed 1234 --cut-documents 5000 "${tokenizer[@]}"
    fi
}

# Build the vocabulary and dataset from the user's text. The size of the vocabulary depends on the text. Documents are shuffled, so
# that the validation set is a random sample. Long documents are split, so that a single book also yields a validation set.
prepare_own() {
    local vocabulary=$folder/own.model size larger most digest said
    read -r size larger most digest <<< "$facts"
    dataset=$folder/own_text_document split=90,10,0 prompt=''
    tokenizer=(--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$vocabulary")
    if [[ $(cat "$folder/own.made-of" 2> /dev/null) == "$digest" ]]; then
        say "Vocabulary and dataset: built from these files already"
        [[ -f $vocabulary ]] || tokenizer=(--tokenizer-type ByteTokenizer)
        return
    fi
    rm -f "$folder/own.made-of" "$vocabulary" "$dataset".{bin,idx}
    local input=(--input "$text" --column "$column" --on-error skip-files "${encoding[@]}")
    local train=(python tools/train_tokenizer.py "${input[@]}" --output "$vocabulary" --kind sentencepiece-bpe --max-bytes 4000000)
    say "Vocabulary: $size sentencepiece tokens"
    if said=$("${train[@]}" --vocab-size "$size" 2>&1) || said=$("${train[@]}" --vocab-size "$larger" 2>&1); then
        echo "$said"
    else
        printf '%s\n' "$said" "Therefore the tokens are the 256 byte values."
        tokenizer=(--tokenizer-type ByteTokenizer)
    fi
    say "Dataset: the text as tokens, in a file of tokens (.bin) and an index (.idx)"
    python tools/preprocess_data.py "${input[@]}" --output-prefix "${dataset%_text_document}" --append-eod --workers 2 --restart \
        --shuffle-seed 1234 --cut-documents "$most" "${tokenizer[@]}"
    echo "$digest" > "$folder/own.made-of"
}

if [[ -n $text ]]; then prepare_own; else prepare_library; fi
last=$((iterations + more)) past=$(cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2> /dev/null || true)
if [[ -e $run/made-by-quickstart && ${past:-0} -gt $last ]]; then
    kept=$run-$past
    while [[ -e $kept ]]; do kept+=+; done
    say "Starting a new run: the earlier run in this folder was extended, and is now in $kept"
    mv "$run" "$kept"
elif [[ -e $run/made-by-quickstart ]]; then
    say "Starting a new run: removing the earlier run, $run"
    rm -r "$run"
fi
mkdir "$run" || exit 1 # a folder that this script did not create stays as it is
touch "$run/made-by-quickstart"

export OMP_NUM_THREADS=1 # 8 processes share the cores of one machine
launch=(python pretrain_gpt.py --nproc 8)
model=(--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.06)
data=(--data-path "$dataset" --split "$split" "${tokenizer[@]}")
layout=(--device cpu --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel)
# The learning rate decays over both runs together.
optimizer=(--lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters "$last" --adam-beta2 0.95)
training=(--micro-batch-size 2 --global-batch-size 8 --eval-interval "$iterations" --eval-iters 8
    --log-interval "$log_interval" --metrics-file "$run/metrics.jsonl" --save "$run/checkpoints")
flags=("${model[@]}" "${data[@]}" "${layout[@]}" "${optimizer[@]}" "${training[@]}")

say "Training: $iterations iterations on 8 processes, tensor 2 x pipeline 2 x data 2"
"${launch[@]}" "${flags[@]}" --train-iters "$iterations"

say "Resuming from the checkpoint for $more more iterations"
"${launch[@]}" "${flags[@]}" --train-iters "$last" --load "$run/checkpoints" --exit-on-missing-checkpoint

say "Sample: the model $([[ -n $prompt ]] && echo "continues a line of Python" || echo "writes a document")"
python tools/generate_text.py --load "$run/checkpoints" --device cpu --prompt "$prompt" --max-new-tokens 60 --temperature 0.7 |
    tee "$run/sample.txt"

say "Done"
python tools/report.py "$run/checkpoints" --expect-lower-loss
curves=$(cd "$folder" && ls run/checkpoints/report.html run/checkpoints/loss.png 2>/dev/null | paste -sd' ' | sed 's/ / and /' || true)
echo "Everything is in $folder:"
echo "  curves       ${curves:-run/checkpoints/history.jsonl}"
echo "  checkpoints  run/checkpoints"
echo "  metrics      run/metrics.jsonl"
echo "  sample       run/sample.txt"

# Print commands that can be pasted into any shell, in any folder. They are short, because the settings are in a file.
python pretrain_gpt.py "${flags[@]}" --train-iters "$last" --print-config > "$run/settings.yaml"
say "Next steps"
python examples/next_steps.py "$folder" --python "$(command -v python)" --prompt "$prompt"
