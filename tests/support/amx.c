/* AMX's tile instructions for processors that lack them: a handler of SIGILL carries out the one that was met.
   After Intel's manual, volume 2A, LDTILECFG to TILEZERO. Whatever else is met goes to the handler before. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

typedef struct { uint8_t palette, start, zeros[14]; uint16_t nbytes[16]; uint8_t rows[16]; } Shapes;

static __thread Shapes shapes;
static __thread uint8_t tiles[8][16][64];
static struct sigaction before;
long met; /* instructions carried out by all threads */

static const int NUMBERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

typedef struct { uint8_t *base; int64_t stride; int length; } Place;

/* What ModRM at `code` names in memory: the stride is the index register, scaled. */
static Place place(const uint8_t *code, const greg_t *registers, int b, int x) {
    Place p = {0, 0, 1};
    int mod = code[0] >> 6, base = code[0] & 7, displacement = mod == 1 ? 1 : mod == 2 ? 4 : 0;
    if (base == 4) {
        int index = (code[1] >> 3 & 7) | x << 3;
        base = code[1] & 7;
        p.stride = index == 4 ? 0 : (int64_t)((uint64_t)registers[NUMBERS[index]] << (code[1] >> 6));
        p.length = 2;
    }
    if (mod == 0 && base == 5) { /* from the instruction's end, or from 0 behind SIB */
        displacement = 4;
        if (p.length == 1) p.base = (uint8_t *)code + 5;
    } else
        p.base = (uint8_t *)registers[NUMBERS[base | b << 3]];
    int32_t by = 0;
    if (displacement == 1) by = (int8_t)code[p.length];
    if (displacement == 4) memcpy(&by, code + p.length, 4);
    p.base += by;
    p.length += displacement;
    return p;
}

static int shaped(int tile) { return shapes.palette == 1 && shapes.rows[tile] && shapes.nbytes[tile]; }

static int multiply(int sums, int left, int right) {
    if (!shaped(sums) || !shaped(left) || !shaped(right) || sums == left || left == right || sums == right) return 0;
    int rows = shapes.rows[sums], width = shapes.nbytes[sums] / 4, depth = shapes.nbytes[left] / 4;
    if (shapes.rows[left] != rows || shapes.rows[right] != depth || shapes.nbytes[right] / 4 != width) return 0;
    for (int m = 0; m < rows; m++)
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < width; n++) {
                int32_t sum;
                memcpy(&sum, &tiles[sums][m][4 * n], 4);
                for (int j = 0; j < 4; j++)
                    sum += (int8_t)tiles[left][m][4 * k + j] * (int8_t)tiles[right][k][4 * n + j];
                memcpy(&tiles[sums][m][4 * n], &sum, 4);
            }
    return 1;
}

/* Carries out what is at `code`; returns its length, or 0 where it is none of these or would raise an exception. */
static int carry_out(const uint8_t *code, const greg_t *registers) {
    if (code[0] != 0xC4 || (code[1] & 31) != 2 || (code[2] & 0x84)) return 0;
    int x = !(code[1] & 0x40), b = !(code[1] & 0x20), prefix = code[2] & 3, other = ~(code[2] >> 3) & 15;
    int mod = code[4] >> 6, tile = code[4] >> 3 & 7;
    if (code[3] == 0x5E && mod == 3 && prefix == 3) return multiply(tile, code[4] & 7, other) ? 5 : 0;
    if (code[3] == 0x49 && mod == 3 && prefix == 0 && code[4] == 0xC0) {
        memset(&shapes, 0, sizeof shapes);
        return 5;
    }
    if (code[3] == 0x49 && mod == 3 && prefix == 3) {
        if (!shaped(tile)) return 0;
        memset(tiles[tile], 0, sizeof tiles[tile]);
        return 5;
    }
    if (mod == 3) return 0;
    Place p = place(code + 4, registers, b, x);
    if (code[3] == 0x49 && prefix == 0 && tile == 0) {
        memcpy(&shapes, p.base, sizeof shapes);
        memset(tiles, 0, sizeof tiles);
        return shapes.palette == 1 ? 4 + p.length : 0;
    }
    if (code[3] != 0x4B || prefix < 2 || !shaped(tile) || (code[4] & 7) != 4) return 0;
    if (prefix == 3) memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int row = 0; row < shapes.rows[tile]; row++) {
        uint8_t *memory = p.base + row * p.stride;
        if (prefix == 3) memcpy(tiles[tile][row], memory, shapes.nbytes[tile]);
        else memcpy(memory, tiles[tile][row], shapes.nbytes[tile]);
    }
    return 4 + p.length;
}

static void met_illegal(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int length = carry_out((const uint8_t *)registers[REG_RIP], registers);
    if (!length) {
        sigaction(number, &before, 0); /* and meets it again */
        return;
    }
    __atomic_add_fetch(&met, 1, __ATOMIC_RELAXED);
    registers[REG_RIP] += length;
}

__attribute__((constructor)) static void install(void) {
    struct sigaction ours = {.sa_sigaction = met_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigaction(SIGILL, &ours, &before);
}
